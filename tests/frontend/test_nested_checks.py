"""Checks in lanes and in nested loops: raised once, after the outermost loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.limited_loops import (
    EACH_LIMITED,
    RUN_TIME,
    assert_no_callback_in_a_loop,
    count_callbacks,
    eagerly,
    inner,
    nested_fori,
    raises,
)


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


def test_no_callback_in_the_body_of_a_differentiated_outer_loop() -> None:
    def loss(x: Any, steps: Any) -> Any:
        return x * NESTED["scan"][0](steps) ** 2 + lx.fori_loop(0, 2, lambda _, x: inner(x, steps), x)

    assert_no_callback_in_a_loop(jax.make_jaxpr(jax.grad(loss))(1.0, jnp.int32(3)))


def test_an_inner_check_is_raised_once() -> None:
    assert count_callbacks(nested_thrice, 3) == count_callbacks(lambda n: inner(0.0, n), 3) > 0


TRANSFORMED_INNER = {
    "jit": jax.jit(inner),
    "vmap": lambda x, n: jax.vmap(inner)(jnp.stack([x, x]), jnp.stack([1, n]))[1],
    "grad": lambda x, n: x + 3.0 * jax.grad(inner)(x, n),
    "checkpoint": jax.checkpoint(inner),
    "cond": lambda x, n: lax.cond(n > 0, inner, lambda x, _: x, x, n),
    "lax.fori_loop": lambda x, n: lax.fori_loop(0, 1, lambda _, x: inner(x, n), x),
}


@pytest.mark.parametrize("how", TRANSFORMED_INNER)
def test_transformed_inner_loop_still_raises_beyond_its_bound_only(how: str) -> None:
    program = jax.jit(lambda n: nested_fori(n, TRANSFORMED_INNER[how]))
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(program(5))
    assert program(3) == 6.0


def test_branch_that_is_not_taken_does_not_raise() -> None:
    untaken = lambda x, n: lax.cond(n < 0, inner, lambda x, _: x, x, n)
    assert jax.jit(lambda n: nested_fori(n, untaken))(5) == 0.0


def test_throw_is_for_its_own_loop_only() -> None:
    outer = lambda n: lx.fori_loop(0, n, lambda _, x: inner(x, n), 0.0, max_steps=2, throw=False)
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jax.jit(outer)(5))
    assert jax.jit(lambda n: nested_fori(n, lambda x, n: inner(x, n, throw=False)))(5) == 6.0


def test_a_lane_that_is_done_raises_no_error_of_its_inner_loop() -> None:
    def triangle(count: Any) -> Any:
        return lx.fori_loop(0, count, lambda i, x: inner(x, i + 1), 0.0)

    lanes = jax.jit(jax.vmap(triangle))
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(lanes(np.array([2, 4])))
    assert lanes(np.array([2, 3])).tolist() == [3.0, 6.0]
