"""The deep-equilibrium model of the examples: its gradient, and what it stores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx

pytestmark = pytest.mark.slow


@pytest.fixture
def model(example):
    """Whose recurrent weights are too large as they are, so that they are made smaller."""
    model = example.Equilibrium(jax.random.key(1))
    return jax.tree.map(lambda x: 4 * x if x is model.recurrent else x, model)


def some(example, number):
    """The first images and labels."""
    digits, _ = example.load()
    return example.Digits(digits.images[:number], digits.labels[:number])


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


def test_memory_does_not_grow_with_the_bound(example, model):
    def kib(name, bound):
        return example.temporary_kib(example.compile_gradient(example.bounded(name, bound), model, some(example, 16)))

    assert kib(example.IMPLICIT, 1000) <= 1.01 * kib(example.IMPLICIT, 30)
    assert kib(example.RESIDUALS, 1000) >= 10 * kib(example.RESIDUALS, 30)
