"""Bounds that are found out when a program runs: every result and derivative raises, where a check can fail."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import (
    EACH_LIMITED,
    RUN_TIME,
    assert_no_callback_in_a_loop,
    doubled,
    eagerly,
    fori_loop,
    inner,
    nested_fori,
    raises,
    rows_up_to,
    scan,
    scan_with_stop,
    while_loop,
)

# ---- the bound is reached


@pytest.mark.parametrize("loop", [fori_loop, scan])
def test_bound_below_a_static_number_of_steps_is_an_error_at_once(loop: Any) -> None:
    with raises(ValueError, f"loopax.{loop.__name__}: max_steps=3 stopped a loop"):
        loop(5, max_steps=3)


LAST = {
    while_loop: lambda result: result[1],
    fori_loop: lambda result: result,
    scan: lambda result: result[0],
    scan_with_stop: lambda result: 2.0 ** result[0],
}


@EACH_LIMITED
@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_without_throw_there_is_what_there_is_and_info_says_so(loop: Any, jit: Any) -> None:
    for most in (3, 0):
        program = jit(lambda n, most=most: loop(n, max_steps=most, throw=False, info=True))
        for steps in (5, 3, 2):
            (result, info), taken = program(steps), min(steps, most)
            assert (LAST[loop](result), info.num_steps, info.limit_reached) == (2.0**taken, taken, steps > most)
    result, info = jit(lambda n: loop(n, max_steps=3, info=True))(3)
    assert (LAST[loop](result), info.num_steps, info.limit_reached) == (8.0, 3, False)


def test_the_end_of_the_rows_of_a_scan_with_stop_is_a_normal_end_and_a_bound_is_not() -> None:
    def ended(last: int, most: int, xs: Any = None, length: Any = None) -> Any:
        options: Any = {"stop": lambda c, _: c >= last, "max_steps": most, "throw": False, "info": True}
        info = lx.scan(lambda c, _: (c + 1, c), 0, xs, length, **options)[1]
        return info.num_steps, info.limit_reached

    assert ended(9, 5, jnp.arange(5)) == ended(9, 5, length=5) == (5, False)
    assert ended(3, 4, jnp.arange(5)) == (3, False)
    assert ended(9, 4, jnp.arange(5)) == (4, True)


# ---- every result depends on the check

RESULTS: Any = {
    "carry": lambda r: r[0][0][0],
    "unchanged leaf": lambda r: r[0][0][1],
    "ys": lambda r: r[0][1],
    "num_steps": lambda r: r[1].num_steps,
    "limit_reached": lambda r: r[1].limit_reached,
}


@pytest.mark.parametrize("result", RESULTS)
def test_each_result_alone_raises(result: str) -> None:
    def run(steps: Any, x: Any) -> Any:
        init = (x, x)
        return RESULTS[result](lx.scan(lambda c, _: ((2.0 * c[0], c[1]), c), init, None, steps, max_steps=3, info=True))

    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jax.jit(run)(5, 1.0))


DERIVATIVES: Any = {
    "grad": jax.grad(doubled),
    "value_and_grad": jax.value_and_grad(doubled),
    "jvp": lambda x, n: jax.jvp(lambda x: doubled(x, n), (x,), (x,))[1],
    "linearize": lambda x, n: jax.linearize(lambda x: doubled(x, n), x)[1](x),
    "grad of grad": jax.grad(jax.grad(lambda x, n: doubled(x * x, n))),
    "vmap of grad": lambda x, n: jax.vmap(jax.grad(doubled), (None, 0))(x, jnp.stack([n, n])),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_each_derivative_alone_raises_beyond_the_bound_only(derivative: str) -> None:
    expected = {"value_and_grad": [8.0, 8.0], "grad of grad": [16.0], "vmap of grad": [[8.0, 8.0]]}
    for program in (DERIVATIVES[derivative], jax.jit(DERIVATIVES[derivative])):
        with raises(RUN_TIME, "max_steps=3 stopped"):
            jax.block_until_ready(program(jnp.float64(1.0), jnp.int32(5)))
        found = program(jnp.float64(1.0), jnp.int32(3))
        assert [np.asarray(x).tolist() for x in jax.tree.leaves(found)] == expected.get(derivative, [8.0])


# ---- lanes and nested loops: raised once, after the outermost loop


@EACH_LIMITED
def test_a_bound_of_lanes(loop: Any) -> None:
    for jit in (jax.jit, eagerly):
        with raises(RUN_TIME, "max_steps=3 stopped"):
            jax.block_until_ready(jit(jax.vmap(lambda n: loop(n, max_steps=3)))(jnp.array([1, 5, 2])))
    _, info = jax.jit(jax.vmap(lambda n: loop(n, max_steps=3, info=True)))(jnp.array([1, 3, 2]))
    assert info.num_steps.tolist() == [1, 3, 2]
    _, info = jax.jit(jax.vmap(lambda n: loop(n, max_steps=3, throw=False, info=True)))(jnp.array([1, 5, 3]))
    assert (info.num_steps.tolist(), info.limit_reached.tolist()) == ([1, 3, 3], [False, True, False])


def nested_thrice(steps: Any) -> Any:
    return lx.fori_loop(0, 2, lambda i, x: x + nested_fori(steps), 0.0)


# With their results for three steps of the inner loop.
NESTED: Any = {
    "fori_loop": (nested_fori, 6),
    "while_loop": (lambda n: lx.while_loop(lambda x: x < 2, lambda x: inner(x, n), 0.0), 3),
    "scan": (lambda n: lx.scan(lambda c, _: (inner(c, n), None), 0.0, jnp.arange(2))[0], 6),
    "thrice": (nested_thrice, 12),
    "cond_fun": (lambda n: lx.while_loop(lambda x: inner(x, n) < 6, lambda x: x + 1.0, 0.0), 3),
    "stop": (
        lambda n: lx.scan(lambda c, _: (c + 1.0, None), 0.0, jnp.arange(3), stop=lambda c, _: inner(c, n) > 5)[0],
        3,
    ),
}


@pytest.mark.parametrize(("outer", "expected"), NESTED.values(), ids=NESTED)
def test_the_bound_of_an_inner_loop_is_checked_after_the_outer_one(outer: Any, expected: int) -> None:
    program = jax.jit(outer)
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(program(5))
    assert program(3) == expected
    assert_no_callback_in_a_loop(jax.make_jaxpr(outer)(jnp.int32(3)))


def test_a_lane_that_is_done_raises_no_error_of_its_inner_loop() -> None:
    def triangle(count: Any) -> Any:
        return lx.fori_loop(0, count, lambda i, x: inner(x, i + 1), 0.0)

    lanes = jax.jit(jax.vmap(triangle))
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(lanes(np.array([2, 4])))
    assert lanes(np.array([2, 3])).tolist() == [3.0, 6.0]


# ---- no callback without need

NO_CHECK: Any = {
    "while_loop without a bound": lambda n: lx.while_loop(lambda x: x < n, lambda x: x + 1, 0),
    "static fori_loop within its bound": lambda n: lx.fori_loop(0, 3, lambda _, x: x + 1, n, max_steps=3),
    "fori_loop to an int32": lambda n: lx.fori_loop(0, n.astype(jnp.int32), lambda _, x: x + 1, 0),
    "scan over rows": lambda n: lx.scan(lambda c, x: (c + x, c), n, jnp.arange(3)),
    "scan with stop over rows": lambda n: lx.scan(lambda c, x: (c + x, c), n, jnp.arange(3), stop=lambda c, _: c > 9),
    "while_loop, throw=False": lambda n: while_loop(n, max_steps=3, throw=False, info=True),
    "fori_loop, throw=False": lambda n: fori_loop(n, max_steps=3, throw=False, info=True),
    "scan over rows, throw=False": lambda n: rows_up_to(n, throw=False, info=True),
    "key without a bound, throw=False": lambda n: lx.while_loop(
        lambda x: x < n, lambda x, key: x + 1, 0, key=jax.random.key(0), throw=False
    ),
    "inner loop, throw=False": lambda n: nested_fori(n, lambda x, n: inner(x, n, throw=False)),
}


@pytest.mark.parametrize("program", NO_CHECK)
def test_no_callback_where_nothing_can_fail_or_throw_is_false(program: str) -> None:
    assert "callback" not in str(jax.make_jaxpr(NO_CHECK[program])(3))


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
def test_a_check_that_is_known_holds_or_raises_when_the_program_is_traced(program: str) -> None:
    """Otherwise when it runs."""
    f, three, four = KNOWN[program], jnp.int32(3), jnp.int32(4)
    assert jax.jit(lambda: at_once(f)(three))() == jax.jit(at_once(f))(three) == jax.jit(f)(three)
    assert "callback" not in str(jax.make_jaxpr(lambda: at_once(f)(three))())
    is_argument = program in ("fori_loop", "nested", "scan over rows")  # which is wrong, as static ones are
    with pytest.raises(ValueError if is_argument else eqx.EquinoxRuntimeError, match=r"^(loopax\.|scan\()"):
        jax.make_jaxpr(lambda: at_once(f)(four))()
    program_with_check = jax.jit(at_once(f)).lower(four).compile()
    with pytest.raises(RUN_TIME, match=r"Error: loopax\."):
        jax.block_until_ready(program_with_check(four))
