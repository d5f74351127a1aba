"""Bounds that are found out when a program runs: every result and every derivative raises."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import (
    EACH_LIMITED,
    RUN_TIME,
    doubled,
    eagerly,
    fori_loop,
    raises,
    scan,
    scan_with_stop,
    while_loop,
)

# ---- the bound is reached


@EACH_LIMITED
def test_bound_that_stops_a_loop_raises(loop: Any) -> None:
    name = loop.__name__.removesuffix("_with_stop")
    where = f"loopax.{name} at ", "limited_loops.py:", f"({loop.__name__}): max_steps=3 stopped a loop"
    with raises(RUN_TIME, *where, "larger max_steps", "throw=False"):
        jax.block_until_ready(jax.jit(lambda n: loop(n, max_steps=3))(jnp.int32(5)))


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
