"""A loop that only counts to a known number has that number as its bound, which nobody has to name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src.core.ir.loop import loop_p
from tests.support.reference import assert_close

CONDITIONS = {
    "<": lambda i: i < 5,
    "<=": lambda i: i <= 4,
    "limit first": lambda i: jnp.greater(5, i) & jnp.greater_equal(4, i),
    "not": lambda i: ~((i >= 5) | (i > 4)),
    "not, limit first": lambda i: ~(jnp.less_equal(5, i) | jnp.less(4, i)),
    "the lowest of limits": lambda i: (i < 9) & ((i < 5) & (i < 7)),
    "another integer": lambda i: (i < 5) & (i * i != 36),
    "inside jit": jax.jit(lambda i: jnp.logical_and(i < 5, i < 6)),
}


def counted(condition, start: Any = 0, step: Any = 1):
    advance = lambda x, s: (s[0] + step, jnp.sin(s[1]) * x)
    return lambda x: lax.while_loop(lambda s: condition(s[0]), lambda s: advance(x, s), (start, x))[1]


def bound_of(function, *args, **options):
    """Of the one loop of the function that is rewritten."""
    jaxpr = jax.make_jaxpr(lx.rewrite_loops(function, **options))(*args)
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive is loop_p]
    return eqn.params["bound"]


def unrolled(x, n=5):
    y = x
    for _ in range(n):
        y = jnp.sin(y) * x
    return y


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_counter_bounds_the_loop(name):
    function = counted(CONDITIONS[name])
    assert bound_of(function, 0.7) == 5
    rewritten = lx.rewrite_loops(function)
    assert_close(jax.jit(jax.value_and_grad(rewritten))(0.7), jax.value_and_grad(unrolled)(0.7))


def test_it_starts_where_the_loop_starts():
    assert bound_of(counted(CONDITIONS["<"], start=3), 0.7) == 2
    assert bound_of(counted(CONDITIONS["<"], start=8), 0.7) == 0
    assert_close(jax.grad(lx.rewrite_loops(counted(CONDITIONS["<"], start=8)))(0.7), 1.0)


@pytest.mark.parametrize(
    "function",
    [
        counted(lambda i: i < 65),  # more than an unknown number of steps has checkpoints
        counted(lambda i: i != 5),
        counted(lambda i: (i < 5) | (i < 3)),
        counted(CONDITIONS["<"], step=2),
        counted(CONDITIONS["<"], step=jnp.int64(-1) * -1),
        lambda x: counted(CONDITIONS["<"], start=x.astype(int))(x),
        counted(lambda i: i <= 127, start=jnp.int8(120)),  # it never ends
        counted(lambda i: i.astype(float) < 4.5),
        counted(lambda i: jax.jit(lambda a, b: (a < 5) & (b < 9))(np.int32(3), i.astype(float))),
        lambda x: lax.while_loop(lambda s: (s[0] < 5) & (s[1] > 0.1), lambda s: (s[0] + 1, s[1] * x), (0, x))[1],
        lambda x: lax.while_loop(lambda s: s[1] & (s[0] < 5), lambda s: (s[0] + 1, s[2] > 1, s[2]), (0, True, x))[2],
    ],
)  # fmt: skip
def test_other_loops_have_no_bound(function):
    """Also those that may end long before their limit: room for all steps costs more than it spares."""
    assert bound_of(function, jnp.float64(0.7)) is None


def test_a_bound_of_the_user_is_lowered():
    function = counted(lambda i: i < 200)
    assert bound_of(function, 0.7) is None
    assert bound_of(function, 0.7, max_steps=1000) == 200
    assert bound_of(function, 0.7, max_steps=150) == 150
    with pytest.raises(Exception, match="max_steps"):
        jax.jit(lx.rewrite_loops(function, max_steps=150))(0.7)


def test_limits_of_lanes_inside_the_function_are_none():
    limits = jnp.array([1, 2, 3])
    lanes = lambda x: jax.vmap(lambda n: counted(lambda i: (i < 5) & (i < n))(x))(limits)
    assert bound_of(lanes, 0.7) is None
    jacobian = jax.jit(jax.jacrev(lx.rewrite_loops(lanes)))(0.7)
    assert_close(jacobian, jnp.stack([jax.grad(unrolled)(0.7, n) for n in (1, 2, 3)]))
