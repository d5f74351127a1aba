"""Neurons that fire: times and their slopes, beside a solution by hand and differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double_precision")]


def test_spikes_in_a_constant_current_are_known(example, monkeypatch):
    """Without a brake, a neuron fires at equal intervals."""
    monkeypatch.setattr(example, "SWINGS", np.zeros(3))
    monkeypatch.setattr(example, "END", 60.0)

    def known(drive):
        times = example.TAU * jnp.log(drive / (drive - 1)) * jnp.arange(1, example.MOST_SPIKES + 1)
        return jnp.where(times < 60.0, times, 0.0)

    def found(drive):
        return example.spikes(example.Neuron(drive, jnp.zeros_like(drive)))[0]

    drives = jnp.array([0.9, 1.5, 2.4])  # the first one never fires
    with_slopes = lambda f: jax.jit(jax.vmap(lambda x: (f(x), jax.jacrev(f)(x), jax.jacfwd(f)(x))))(drives)
    ours = with_slopes(found)
    assert not ours[0][0].any()
    assert not ours[1][0].any()
    for a, b in zip(ours, with_slopes(known), strict=True):
        np.testing.assert_allclose(a[1:], b[1:], rtol=1e-6)


def test_the_slopes_of_late_spikes_are_those_of_differences(example):
    """Each spike moves all later ones, by the time and by the brake."""
    neuron = example.Neuron(jnp.array(1.7), jnp.array(0.2))
    times = jax.jit(lambda *numbers: example.spikes(example.Neuron(*numbers))[0])
    slopes = jax.jit(jax.jacrev(times, (0, 1)))(*neuron)
    for i, slope in enumerate(slopes):
        ahead, behind = (times(*(x + h * (i == j) for j, x in enumerate(neuron))) for h in (1e-6, -1e-6))
        assert jnp.count_nonzero(slope) > 10
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-4)
