"""The multi-step integrator of the examples: its order, and a plain Python loop of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.example_files import assert_nearly

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_order_of_convergence(example, order):
    """dy/dt = cos(t) y with y(0) = 1, in float64: halving the step divides the error by 2 to the order."""
    exact = lambda t: jnp.exp(jnp.sin(t))[:, None]

    def error(steps):
        size = 2.0 / steps
        integrator = example.Integrator(lambda y, t: jnp.cos(t) * y, None, order, size)
        times = size * jnp.arange(steps + 1)
        states = integrator(exact(times[:order]), times, steps + 1 - order)
        return float(jnp.abs(states - exact(times[order:])).max())

    with jax.enable_x64(True):
        assert np.log2(error(128) / error(256)) == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize("corrected", [True, False])
def test_rollout_equals_python(example, corrected):
    integrator = example.make(corrected)

    def python(integrator, past, torques, length):
        points = [(y, integrator.slope(y, u)) for y, u in zip(past, torques, strict=False)]
        for u in torques[len(past) :][:length]:
            state, slopes = points[-1][0], jnp.stack([slope for _, slope in points[-integrator.order :]])
            mean = example.adams_bashforth(integrator.order)[::-1].astype(np.float32) @ slopes
            mean = mean + integrator.correction(state, slopes) if corrected else mean
            state = state + integrator.size * mean
            points.append((state, integrator.slope(state, u)))
        return jnp.stack([state for state, _ in points[len(past) :]])

    train, _ = example.load()
    past, torques = jnp.asarray(train.states[50, : example.ORDER]), jnp.asarray(train.torques[50])
    ours = eqx.filter_value_and_grad(lambda f: (f(past, torques, jnp.int32(5)) ** 2).sum())(integrator)
    theirs = eqx.filter_value_and_grad(lambda f: (python(f, past, torques, 5) ** 2).sum())(integrator)
    assert_nearly(ours, theirs, 2e-5)
    assert not integrator(past, torques, jnp.int32(5))[5:].any()
