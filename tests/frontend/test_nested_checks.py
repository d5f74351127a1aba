"""Checks in lanes and in nested loops: raised once, after the outermost loop."""

from typing import Any

import equinox as eqx
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
    rows_up_to,
)


@EACH_LIMITED
@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_bound_reached_in_one_lane_raises(loop: Any, jit: Any) -> None:
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jit(jax.vmap(lambda n: loop(n, max_steps=3)))(jnp.array([1, 5, 2])))


@EACH_LIMITED
def test_bound_reached_in_no_lane_does_not_raise(loop: Any) -> None:
    _, info = jax.jit(jax.vmap(lambda n: loop(n, max_steps=3, info=True)))(jnp.array([1, 3, 2]))
    assert info.num_steps.tolist() == [1, 3, 2]


@EACH_LIMITED
def test_without_throw_info_is_per_lane(loop: Any) -> None:
    _, info = jax.jit(jax.vmap(lambda n: loop(n, max_steps=3, throw=False, info=True)))(jnp.array([1, 5, 3]))
    assert (info.num_steps.tolist(), info.limit_reached.tolist()) == ([1, 3, 3], [False, True, False])


def test_length_beyond_xs_in_one_lane_raises() -> None:
    with raises(RUN_TIME, "xs has 3 rows"):
        jax.vmap(rows_up_to)(jnp.array([1, 4, 2]))


def nested_while(steps: Any) -> Any:
    return lx.while_loop(lambda x: x < 2, lambda x: inner(x, steps), 0.0)


def nested_scan(steps: Any) -> Any:
    return lx.scan(lambda c, _: (inner(c, steps), None), 0.0, jnp.arange(2))[0]


def nested_thrice(steps: Any) -> Any:
    return lx.fori_loop(0, 2, lambda i, x: x + nested_fori(steps), 0.0)


def nested_in_cond_fun(steps: Any) -> Any:
    return lx.while_loop(lambda x: inner(x, steps) < 6, lambda x: x + 1.0, 0.0)


def nested_in_stop(steps: Any) -> Any:
    return lx.scan(lambda c, _: (c + 1.0, None), 0.0, jnp.arange(3), stop=lambda c, _: inner(c, steps) > 5)[0]


NESTED = [nested_fori, nested_while, nested_scan, nested_thrice, nested_in_cond_fun, nested_in_stop]


EXPECTED = {
    nested_fori: 6,
    nested_while: 3,
    nested_scan: 6,
    nested_thrice: 12,
    nested_in_cond_fun: 3,
    nested_in_stop: 3,
}


@pytest.mark.parametrize("outer", NESTED)
def test_bound_reached_in_an_inner_loop_raises_and_in_none_does_not(outer: Any) -> None:
    program = jax.jit(outer)
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(program(5))
    assert program(3) == EXPECTED[outer]


def test_bound_reached_in_an_inner_loop_raises_outside_of_jit() -> None:
    with raises(eqx.EquinoxRuntimeError, "max_steps=3 stopped"):
        lx.fori_loop(0, 5, lambda i, x: inner(x, i), 0.0)


@pytest.mark.parametrize("outer", NESTED)
def test_no_callback_in_the_body_of_an_outer_loop(outer: Any) -> None:
    program = jax.make_jaxpr(outer)(jnp.int32(3))
    assert_no_callback_in_a_loop(program)


@pytest.mark.parametrize("outer", [nested_fori, nested_scan])
def test_no_callback_in_the_body_of_a_differentiated_outer_loop(outer: Any) -> None:
    def loss(x: Any, steps: Any) -> Any:
        return x * outer(steps) ** 2 + lx.fori_loop(0, 2, lambda _, x: inner(x, steps), x)

    program = jax.make_jaxpr(jax.grad(loss))(1.0, jnp.int32(3))
    assert_no_callback_in_a_loop(program)


def test_an_inner_check_is_raised_once() -> None:
    assert count_callbacks(nested_thrice, 3) == count_callbacks(lambda n: inner(0.0, n), 3) > 0


def test_inner_loop_under_vmap_is_raised_after_the_outer_loop() -> None:
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.vmap(nested_fori)(jnp.array([1, 5]))


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
