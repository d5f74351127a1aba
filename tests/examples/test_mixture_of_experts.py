"""The mixture of experts of the examples: losses and gradients of its ways, and what it counts."""

from functools import partial

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.slow


def some(example, number):
    """The first images and labels, in float64."""
    digits, _ = example.load()
    return example.Digits(digits.images[:number].astype(np.float64), digits.labels[:number])


@pytest.mark.parametrize("number", [1, 4])
def test_losses_and_gradients_are_those_of_all_experts(example, number):
    with jax.enable_x64(True):
        digits, model = some(example, 100), example.Mixture(jax.random.key(1), number)
        by_all, *others = [
            jax.jit(jax.value_and_grad(partial(example.loss, way=way)))(model, digits)
            for way in (example.by_einsum, example.by_switch, example.by_lax)
        ]
        assert jax.tree.leaves(by_all)[1].dtype == np.float64
        for found in others:
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(by_all), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


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
