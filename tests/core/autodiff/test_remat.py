"""`jax.checkpoint` around loops, inside their bodies, with and without a policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.reference import assert_close


@pytest.mark.parametrize("lanes", [lx.Lockstep(), lx.Compact(min_lanes=1, shrink=2)], ids=["lockstep", "compact"])
@pytest.mark.parametrize("loop", ["fori", "while"])
def test_batches_that_depend_on_no_tangent(loop, lanes):
    """JAX asks in `jax.checkpoint` for the known part of a batch that is known, too."""
    step = lambda h: jnp.sin(h) + 1.2 * h

    def run(n, h):
        if loop == "fori":
            return lx.fori_loop(0, n, lambda _, h: step(h), h, max_steps=5, lanes=lanes)
        return lx.while_loop(lambda h: h < 2.0, step, h, max_steps=5, lanes=lanes)

    starts, counts = np.array([0.5, 0.7, 0.2]), np.array([1, 4, 2])
    batch = lambda scale, h: jnp.sin(scale * jax.vmap(run)(counts, h)).sum()
    found = [jax.jit(jax.grad(f, (0, 1)))(2.0, starts) for f in (batch, jax.checkpoint(batch))]
    assert_close(found[0], found[1])
    assert_close(jax.jit(jax.grad(jax.checkpoint(batch)))(2.0, starts), found[0][0])
    second = [jax.jit(jax.grad(jax.grad(f), 1))(2.0, starts) for f in (batch, jax.checkpoint(batch))]
    assert_close(second[0], second[1])
