"""The deep-equilibrium model of the examples: its layer, its gradient, what it counts, and what it stores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.example_files import load_example

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_precision")]


@pytest.fixture
def example():
    return load_example("deep_equilibrium")


@pytest.fixture
def model(example):
    """Whose recurrent weights are too large as they are, so that they are made smaller."""
    model = example.Equilibrium(jax.random.key(1))
    return jax.tree.map(lambda x: 4 * x if x is model.recurrent else x, model)


def some(example, number):
    """The first images and labels."""
    digits, _ = example.load()
    return example.Digits(digits.images[:number], digits.labels[:number])


def by_python(example, model, image):
    """The fixed point, and the steps to it."""
    matrix, shift = np.asarray(model.matrix()), np.asarray(model.inward(image))
    z, change, steps = np.zeros_like(shift), np.inf, 0
    while change > example.TOLERANCE:
        after = np.tanh(matrix @ z + shift)
        z, change, steps = after, np.linalg.norm(after - z) / np.linalg.norm(after), steps + 1
    return z, steps


def products_by_python(example, model, image, label):
    """The products of the linear solver, at that fixed point."""
    z, _ = by_python(example, model, image)
    slopes = jax.jacobian(lambda z: jnp.tanh(model.matrix() @ z + model.inward(image)))(jnp.asarray(z))
    jacobian = np.asarray(slopes)
    cross_entropy = lambda z: -jax.nn.log_softmax(model.readout(z))[label]
    b = np.asarray(jax.grad(cross_entropy)(jnp.asarray(z)))
    x, residual, products = b, jacobian.T @ b, 1
    while np.linalg.norm(residual) > example.TOLERANCE * np.linalg.norm(b):
        x = x + residual
        residual, products = b - (x - jacobian.T @ x), products + 1
    return products


def test_the_layer_is_a_contraction(example, model):
    assert np.linalg.norm(model.recurrent, 2) > 1.5
    assert np.linalg.norm(model.matrix(), 2) <= 1.1 * example.CONTRACTION


def test_a_loop_ends_at_a_fixed_point(example, model):
    image = some(example, 1).images[0]
    matrix, shift = model.matrix(), model.inward(image)
    layer = lambda z: jnp.tanh(matrix @ z + shift)
    z, _ = example.until_converged(layer, jnp.zeros_like(shift), None)
    assert jnp.linalg.norm(layer(z) - z) <= example.TOLERANCE * jnp.linalg.norm(z)


def test_the_implicit_gradient_is_that_of_all_steps(example, model, monkeypatch):
    monkeypatch.setattr(example, "TOLERANCE", 1e-13)
    with jax.enable_x64(True):
        images, labels = some(example, 5)
        digits = example.Digits(images.astype(np.float64), labels)
        model = jax.tree.map(lambda x: x.astype(jnp.float64), model)
        gradient = lambda search: jax.jit(jax.grad(partial(example.loss, search=search)))(model, digits)
        implicit = gradient(partial(example.until_converged, max_steps=1000))
        for kind in (lx.Residuals(), lx.Checkpointed()):
            by_steps = gradient(partial(example.by_steps, kind=kind, max_steps=1000))
            assert example.relative_error(implicit, by_steps) <= 1e-8
        by_hand = gradient(partial(example.by_hand, num_steps=1000))
        assert example.relative_error(implicit, by_hand) <= 1e-8


def test_what_is_counted_is_what_python_takes(example, model):
    """In float64, where rounding decides nothing, and with images that take different numbers of steps."""
    with jax.enable_x64(True):
        images, labels = some(example, 6)
        images = images.astype(np.float64) * np.linspace(0.1, 3.0, len(images))[:, None]
        model = jax.tree.map(lambda x: x.astype(jnp.float64), model)
        forward = [by_python(example, model, image)[1] for image in images]
        products = [products_by_python(example, model, *pair) for pair in zip(images, labels, strict=True)]
        for name, backward in ((example.IMPLICIT, products), (example.RESIDUALS, forward)):
            found = example.evaluate(model, example.Digits(images, labels), example.WAYS[name])
            assert found.forward.tolist() == forward
            assert found.backward.tolist() == backward
    assert len(set(forward)) > 1


def test_the_kinds_count_each_step_back_once(example, model):
    for name in (example.RESIDUALS, example.CHECKPOINTED, example.SCAN):
        found = example.evaluate(model, some(example, 6), example.WAYS[name])
        assert found.backward.tolist() == found.forward.tolist()


def test_a_few_updates_lower_the_loss(example):
    digits, _ = example.load()
    _, losses = example.train(digits, example.until_converged, updates=20)
    assert np.mean(losses[-3:]) < 0.6 * losses[0]


def test_memory_does_not_grow_with_the_bound(example, model):
    def kib(name, bound):
        return example.temporary_kib(example.compile_gradient(example.bounded(name, bound), model, some(example, 16)))

    assert kib(example.IMPLICIT, 1000) <= 1.01 * kib(example.IMPLICIT, 30)
    assert kib(example.RESIDUALS, 1000) >= 10 * kib(example.RESIDUALS, 30)
