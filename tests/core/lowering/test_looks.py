"""Loops of which the host looks at the condition (on a GPU): the same steps, segments and results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.problem import name_of
from tests.support.reference import assert_close

H, W = np.linspace(0.2, 0.9, 3), np.array([0.9, 1.1, 0.7])
KINDS = [lx.Checkpointed(1), lx.Checkpointed(3), lx.Checkpointed(7), "auto"]


def until(h, w, n, kind, **options):
    take = lambda c: (c[0] + 1, jnp.sin(c[1] * w) + 0.1 * c[1])
    return lx.while_loop(lambda c: c[0] < n, take, (jnp.int32(0), h), kind=kind, **options)[1].sum()


def counted(h, w, n, kind, **options):
    step = lambda _, h: jnp.sin(h * w) + 0.1 * h
    return lx.fori_loop(0, n, step, h, max_steps=40, kind=kind, **options).sum()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind if isinstance(kind, str) else name_of(kind))
@pytest.mark.parametrize("loop", [until, counted])
def test_values_and_gradients_of_any_length(loop, kind):
    both = lambda n: jax.value_and_grad(lambda h, w: loop(h, w, n, kind), (0, 1))(H, W)
    lengths = jnp.arange(40, dtype=jnp.int32)
    in_turn = jax.jit(lambda lengths: jax.lax.map(both, lengths))
    expected = in_turn(lengths)
    with lx.configure(calibration="h100"):
        assert_close(jax.jit(lambda lengths: jax.lax.map(both, lengths))(lengths), expected)
        lanes = jax.jit(jax.grad(lambda w: jax.vmap(lambda n: loop(H, w, n, kind))(lengths).sum()))(W)
    assert_close(lanes, expected[1][1].sum(0))
