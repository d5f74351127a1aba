"""Compact lanes of a loop that stands in another program: only what results need of the batch is evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx

STARTS = jnp.array([1.0, 2.0, 0.1])


def while_loop(s, x, lanes):
    return lx.while_loop(
        lambda s: jnp.abs(s) > 0.4, lambda s: 0.7 * s * jnp.cos(x), s, lanes=lanes, max_steps=8, throw=False
    )


def fori_loop(s, x, lanes):
    return lx.fori_loop(0, (4 * jnp.abs(x)).astype(int), lambda i, s: 0.9 * s * jnp.cos(x), s, lanes=lanes)


def branch(s, x, lanes):
    return lx.cond(s > x, lambda s: jnp.sin(s) * x, lambda s: s * x * x, s, lanes=lanes)


LOOPS = [while_loop, fori_loop, branch]
AROUND = {
    "checkpoint": jax.checkpoint,
    "a policy": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    "scan": lambda f: lambda s, x: lax.scan(lambda s, _: (f(s, x), None), s, None, length=2)[0],
    "cond": lambda f: lambda s, x: lax.cond(x > 100.0, lambda s, x: s, f, s, x),
    "jit": jax.jit,
}


def value(loop, around, lanes):
    """Of a loop whose body has the other loop, in another program. `s` and `x` have derivatives."""
    once = AROUND[around](lambda s, x: loop(jnp.sin(2.0 * s) + 0.5, x, lanes))

    def lane(t):
        return lx.scan(lambda s, x: (once(s, x), None), t, jnp.array([0.5, 1.1]) * t)[0]

    return jax.jit(lambda ts: jax.vmap(lane)(ts).sum())


# `test_compact.py` has others in the fast share.
SLOW = [name for name in AROUND if name != "a policy"]


@pytest.mark.parametrize("around", [pytest.param(a, marks=pytest.mark.slow) if a in SLOW else a for a in AROUND])
@pytest.mark.parametrize("loop", LOOPS)
def test_derivatives_of_compact_lanes_in_another_program(loop, around):
    got, expected = value(loop, around, "compact"), value(loop, around, "lockstep")
    for derivative in (jax.grad, lambda f: lambda t: jax.jvp(jax.grad(f), (t,), (t,))):
        np.testing.assert_allclose(
            jax.tree.leaves(derivative(got)(STARTS)), jax.tree.leaves(derivative(expected)(STARTS)), rtol=1e-6
        )
