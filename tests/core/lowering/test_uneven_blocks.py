"""Blocks of a static length, of which the last one has fewer steps: on a GPU, all loops have lengths that XLA knows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.reference import assert_close

H, W = np.linspace(0.2, 0.9, 3), np.array([0.9, 1.1, 0.7])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 5, 13, 29])
def test_gradients(length, reverse):
    xs = np.linspace(0.0, 1.0, length)

    def loss(h: Any, w: Any, xs: Any, kind: Any = "auto") -> Any:
        step = lambda h, x: (jnp.sin(h * w) + 0.1 * x * h, h * x)
        h, ys = lx.scan(step, h, xs, kind=kind, reverse=reverse)
        return h.sum() + (ys**2).sum()

    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(H, W, xs)
    with lx.configure(calibration="h100"):
        for kind in (lx.Checkpointed(), lx.Checkpointed(9)):
            of = jax.grad(partial(loss, kind=kind), (0, 1, 2))
            assert_close(jax.jit(of)(H, W, xs), expected)
            lanes = jax.jit(jax.vmap(of, (0, None, None)))(np.stack([H, H]), W, xs)
            assert_close(tuple(x[1] for x in lanes), expected)
            taken = lambda h, take, kind=kind: jax.lax.cond(take, lambda h: loss(h, W, xs, kind), lambda h: h.sum(), h)
            assert_close(jax.jit(jax.grad(taken))(H, True), expected[0])
