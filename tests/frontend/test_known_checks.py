"""Checks that cannot fail leave no callback, and those that are known when a program is traced raise then."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.limited_loops import (
    RUN_TIME,
    SUM,
    count_callbacks,
    doubled,
    fori_loop,
    inner,
    nested_fori,
    raises,
    rows_up_to,
    scan,
    while_loop,
)

# ---- no callback without need

NO_CHECK: Any = {
    "while_loop without a bound": lambda n: lx.while_loop(lambda x: x < n, lambda x: x + 1, 0),
    "static fori_loop within its bound": lambda n: lx.fori_loop(0, 3, lambda _, x: x + 1, n, max_steps=3),
    "fori_loop to an int32": lambda n: lx.fori_loop(0, n.astype(jnp.int32), lambda _, x: x + 1, 0),
    "fori_loop between int8": lambda n: lx.fori_loop(n.astype(jnp.int8), jnp.int8(3), lambda _, x: x + 1, 0),
    "uint8 within a bound": lambda n: lx.fori_loop(0, n.astype(jnp.uint8), lambda _, x: x + 1, 0, max_steps=255),
    "scan over rows": lambda n: lx.scan(lambda c, x: (c + x, c), n, jnp.arange(3)),
    "static scan within its bound": lambda n: lx.scan(lambda c, _: (c + 1, c), n, length=3, max_steps=4),
    "uint8 steps over enough rows": lambda n: lx.scan(SUM, 0.0, jnp.arange(255.0), n.astype(jnp.uint8)),
    "scan with stop over rows": lambda n: lx.scan(lambda c, x: (c + x, c), n, jnp.arange(3), stop=lambda c, _: c > 9),
    "scan with stop without rows": lambda n: lx.scan(lambda c, _: (c + 1, None), n, stop=lambda c, _: c > 9),
    "while_loop, throw=False": lambda n: while_loop(n, max_steps=3, throw=False, info=True),
    "fori_loop, throw=False": lambda n: fori_loop(n, max_steps=3, throw=False, info=True),
    "fori_loop between int64, throw=False": lambda n: fori_loop(n, throw=False),
    "scan, throw=False": lambda n: scan(n, max_steps=3, throw=False, info=True),
    "scan over rows, throw=False": lambda n: rows_up_to(n, throw=False, info=True),
    "key without a bound, throw=False": lambda n: lx.while_loop(
        lambda x: x < n, lambda x, key: x + 1, 0, key=jax.random.key(0), throw=False
    ),
    "inner loop, throw=False": lambda n: nested_fori(n, lambda x, n: inner(x, n, throw=False)),
}


@pytest.mark.parametrize("program", NO_CHECK)
def test_no_callback_where_nothing_can_fail_or_throw_is_false(program: str) -> None:
    assert "callback" not in str(jax.make_jaxpr(NO_CHECK[program])(3))


@pytest.mark.parametrize("loop", [while_loop, fori_loop, scan, lambda n, max_steps: rows_up_to(n)])
def test_callback_where_something_can_fail(loop: Any) -> None:
    assert count_callbacks(lambda n: loop(n, max_steps=3), 3) > 0


# ---- what is known when the program is traced


def at_once(f: Any) -> Any:
    """Inside of `jit`, what does not depend on its arguments is computed when it is traced."""

    def run(*arguments: Any, **options: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return f(*arguments, **options)

    return run


KNOWN: Any = {
    "while_loop": lambda n: while_loop(n, max_steps=3)[1],
    "fori_loop": lambda n: fori_loop(n, max_steps=3),
    "scan": lambda n: scan(n, max_steps=3)[0],
    "scan over rows": lambda n: rows_up_to(n)[0],
    "nested": nested_fori,
    "gradient": lambda n: jax.grad(doubled)(1.0, n),
    "Buffer": lambda n: lx.fori_loop(0, n, lambda i, b: b.append(i), lx.Buffer(3, like=jnp.int32(0)))[-1],
    "History": lambda n: lx.History(4, like=0.0)[n],
}


@pytest.mark.parametrize("program", KNOWN)
def test_check_that_is_known_to_hold_is_none(program: str) -> None:
    """Neither of values that are known then, nor of values that are not."""
    f = KNOWN[program]
    three = jnp.int32(3)
    expected = jax.jit(f)(three)
    assert jax.jit(lambda: at_once(f)(three))() == expected
    assert jax.jit(at_once(f))(three) == expected
    assert "callback" not in str(jax.make_jaxpr(lambda: at_once(f)(three))())


@pytest.mark.parametrize("program", KNOWN)
def test_check_that_is_known_to_fail_raises_when_the_program_is_traced(program: str) -> None:
    f, four = KNOWN[program], jnp.int32(4)
    is_argument = program in ("fori_loop", "nested", "scan over rows")  # which is wrong, as static ones are
    with pytest.raises(ValueError if is_argument else eqx.EquinoxRuntimeError, match=r"^(loopax\.|scan\()"):
        jax.make_jaxpr(lambda: at_once(f)(four))()
    program_with_check = jax.jit(at_once(f)).lower(four).compile()  # which is not known then
    with pytest.raises(RUN_TIME, match=r"Error: loopax\."):
        jax.block_until_ready(program_with_check(four))


def test_known_checks_in_the_body_of_a_loop() -> None:
    def known(x: Any, steps: int) -> Any:
        return x + at_once(while_loop)(steps, max_steps=3)[1]

    assert jax.jit(lambda n: lx.fori_loop(0, n, lambda _, x: known(x, 3), 0.0))(2) == 16.0
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jax.jit(lambda n: lx.fori_loop(0, n, lambda _, x: known(x, 4), 0.0))(2))
