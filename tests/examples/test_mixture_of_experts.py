"""The mixture of experts of the examples: its ways, gradient and second loss, what it counts, and what it learns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.example_files import load_example

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_precision")]


@pytest.fixture
def example():
    return load_example("mixture_of_experts")


def some(example, number):
    """The first images and labels, in float64."""
    digits, _ = example.load()
    return example.Digits(digits.images[:number].astype(np.float64), digits.labels[:number])


def model_of(example, number):
    """Whose experts are chosen for some images each."""
    return example.Mixture(jax.random.key(1), number)


def by_python(example, model, images):
    """What the expert of each image returns."""
    _, routes = model.routed(images)
    inward, outward = map(np.asarray, model.experts)
    found = [outward[k] @ np.maximum(inward[k] @ image, 0) for k, image in zip(routes, images, strict=True)]
    return np.stack(found), routes


@pytest.mark.parametrize("way", ["by_switch", "by_einsum", "by_lax"])
def test_the_expert_of_each_image_is_evaluated(example, way):
    with jax.enable_x64(True):
        images, model = some(example, 50).images, model_of(example, 4)
        expected, routes = by_python(example, model, images)
        assert len(set(routes.tolist())) == 4
        found = jax.jit(getattr(example, way))(model.experts, images, routes)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("number", [1, 4])
def test_losses_and_gradients_are_those_of_all_experts(example, number):
    with jax.enable_x64(True):
        digits, model = some(example, 100), model_of(example, number)
        by_all, *others = [
            jax.jit(jax.value_and_grad(partial(example.loss, way=way)))(model, digits)
            for way in (example.by_einsum, example.by_switch, example.by_lax)
        ]
        assert jax.tree.leaves(by_all)[1].dtype == np.float64
        for found in others:
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(by_all), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


def test_the_router_learns_by_the_gate_and_by_the_second_loss(example):
    digits, model = some(example, 100), model_of(example, 4)

    def gradient(balance):
        found = jax.grad(partial(example.loss, way=example.by_switch, balance=balance))(model, digits)
        return found.router.weight

    of_gate, of_both = gradient(0.0), gradient(1.0)
    assert jnp.abs(of_gate).max() > 1e-4
    assert jnp.abs(of_both - of_gate).max() > 1e-3


def test_the_second_loss_is_least_where_images_are_spread(example):
    evenly = example.imbalance(jnp.full((8, 4), 0.25), jnp.arange(8) % 4)
    to_one = example.imbalance(jnp.tile(jnp.array([1.0, 0.0, 0.0, 0.0]), (8, 1)), jnp.zeros(8, jnp.int32))
    assert (float(evenly), float(to_one)) == (1.0, 4.0)


def test_an_expert_is_evaluated_in_batches_of_its_own_images(example, monkeypatch):
    """Each batch tells of itself; padding is in its size, and the batches are as many as the page says."""
    sizes = []
    whole = example.expert

    @jax.custom_batching.custom_vmap
    def counted(image):
        return image

    @counted.def_vmap
    def _(size, _, images):
        jax.debug.callback(lambda: sizes.append(size))
        return images, True

    monkeypatch.setattr(example, "expert", lambda inward, outward, image: whole(inward, outward, counted(image)))
    digits, model = some(example, 200), example.Mixture(jax.random.key(1))
    _, routes = model.routed(digits.images)
    jax.block_until_ready(jax.jit(example.by_switch)(model.experts, digits.images, routes))
    jax.effects_barrier()
    assert sum(sizes) == example.evaluations(np.bincount(routes, minlength=example.EXPERTS))
    assert sum(sizes) < 200 + example.EXPERTS * example.GATHERED


def test_a_few_updates_lower_the_loss(example):
    digits, _ = example.load()
    _, losses = example.train(digits, example.by_switch, updates=15)
    assert np.mean(losses[-3:]) < 0.7 * losses[0]


def test_memory_is_less_than_that_of_all_experts(example):
    digits, model = some(example, 256), example.Mixture(jax.random.key(1))

    def mib(way):
        return example.cost(model, digits, way, 1).mib

    assert mib(example.by_switch) < 0.5 * mib(example.by_einsum)
