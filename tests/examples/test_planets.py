"""The planets of the examples: gradients against another kind, and a short fit."""

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


def test_a_short_horizon_is_fitted(example, monkeypatch):
    monkeypatch.setattr(example, "HORIZONS", (5000,))
    q, true, observed = example.problem()
    guess = example.first_guess(q, observed)
    fitted, misfits = example.fit(q, guess, observed)
    assert misfits[-1] < 0.01 * misfits[0]
    assert jnp.abs(fitted - true).max() < 0.1 * jnp.abs(guess - true).max()
