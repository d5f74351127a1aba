"""The multi-step integrator of the examples: its order, a plain Python loop of it, one compilation, and training."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.example_files import load_example

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_precision")]


@pytest.fixture(scope="module")
def example():
    with jax.enable_x64(False):
        return load_example("multistep_integrator")


@pytest.fixture(scope="module")
def few(example):
    """Some windows of the training runs."""
    train, _ = example.load()
    return jax.tree.map(lambda x: x[::10], train)


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
def test_rollout_equals_python(example, few, corrected):
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

    past, torques = jnp.asarray(few.states[5, : example.ORDER]), jnp.asarray(few.torques[5])
    ours = eqx.filter_value_and_grad(lambda f: (f(past, torques, jnp.int32(5)) ** 2).sum())(integrator)
    theirs = eqx.filter_value_and_grad(lambda f: (python(f, past, torques, 5) ** 2).sum())(integrator)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()))
    assert not integrator(past, torques, jnp.int32(5))[5:].any()


def test_training(example, few):
    """Also with less memory, which changes nothing but what a gradient stores."""
    before = example.make(True)
    after = example.fit(before, few, updates=60)
    assert example.loss(after, few) < 0.8 * example.loss(before, few)
    again = example.fit(replace(before, kind=lx.Checkpointed(3)), few, updates=60)
    weights = (jax.tree.leaves(eqx.filter(f, eqx.is_array)) for f in (after, again))
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
