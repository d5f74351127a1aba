"""The planets of the examples: gradients against another kind."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double_precision")]


def test_gradients_are_those_of_another_kind(example):
    q, v, observed = example.problem()
    gradient = lambda kind: jax.jit(jax.grad(lambda v, n: example.misfit(v, q, observed, n, kind)))(1.001 * v, 3000)
    found, expected = gradient(None), gradient(lx.Checkpointed())
    assert jnp.abs(found - expected).max() <= 1e-9 * jnp.abs(expected).max()
