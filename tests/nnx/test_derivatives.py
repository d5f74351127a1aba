"""Derivatives of loops that carry NNX objects, and the randomness that replays repeat."""

import functools as ft
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import loopax as lx
from tests.nnx.cells import COUNTS, KINDS, STEPS, X, apply, cell, fori_loop, python, same, scan, while_loop


def loss_of(run: Any, model: Any, x: Any) -> Any:
    model, y = run(model, x)
    return (y**2).sum() + model.mean[...]


# What Python loops give is computed once.


@ft.cache
def gradient_of_python() -> Any:
    """The value, the state of the gradient, and the model afterwards."""
    plain = cell()
    value, gradient = nnx.jit(nnx.value_and_grad(partial(loss_of, partial(python, STEPS))))(plain, X)
    return value, nnx.state(gradient), plain


# NNX objects are arrays before a loop sees them: each kind with one loop, each loop with two kinds.
EACH = [
    pytest.param(loop, kind, id=f"{loop.__name__}-{kind}")
    for n, loop in enumerate([while_loop, fori_loop, scan])
    for k, kind in enumerate(KINDS)
    if (k + n) % 3 == 0
]


@pytest.mark.parametrize(("loop", "kind"), EACH)
def test_gradients(loop: Any, kind: Any) -> None:
    """Those of the Python loop: the masks of the forward pass are those of the backward pass."""
    if kind == "lax":  # differentiates a number of steps that is known
        loop = lambda n, step, init, kind: lx.fori_loop(0, n, lambda _, c: step(c), init, kind=kind)
    model = cell()
    run = lambda model, x: loop(STEPS, apply, (model, x), kind=kind)
    value, gradient = nnx.jit(nnx.value_and_grad(partial(loss_of, run)))(model, X)
    expected, state, plain = gradient_of_python()
    np.testing.assert_allclose(value, expected)
    same([nnx.state(gradient)], [state])
    same([model], [plain])


def test_training_with_an_optimizer_in_the_carry() -> None:
    """The body takes gradients, and changes two objects that are tied to each other."""

    def step(carry: Any, x: Any) -> Any:
        model, optimizer = carry
        loss, gradient = nnx.value_and_grad(lambda model: ((model(x) - 1.0) ** 2).sum())(model)
        optimizer.update(model, gradient)
        return carry, loss

    models, xs, once = (cell(), cell()), np.arange(12.0).reshape(4, 3), nnx.jit(step)
    objects, expected = ((model, nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)) for model in models)
    _, losses = nnx.jit(lambda objects, xs: lx.scan(step, objects, xs))(objects, xs)
    np.testing.assert_allclose(losses, [once(expected, x)[1] for x in xs])
    same(objects, expected)
    assert objects[1].step[...] == 4


# ---- randomness


def mask(carry: Any, _: Any) -> Any:
    dropout, x = carry
    dropped = dropout(jnp.ones(64))
    return (dropout, x * dropped), dropped > 0


def test_lanes_with_rngs_of_their_own() -> None:
    """From a key for each lane; lanes that share one draw the same."""

    def lane(key: Any, n: Any) -> Any:
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(key))
        return lx.scan(mask, (dropout, jnp.ones(64)), jnp.arange(4), n)[1]

    keys = jax.random.split(jax.random.key(0), 4)
    masks = np.asarray(jax.jit(jax.vmap(lane, in_axes=(0, None)))(keys, 4)).reshape(16, 64)
    assert len({tuple(row.tolist()) for row in masks}) == 16
    shared = np.asarray(jax.jit(jax.vmap(lane, in_axes=(None, 0)))(jax.random.key(0), COUNTS))
    for row, n in zip(shared, COUNTS, strict=True):
        np.testing.assert_array_equal(row[:n], shared[2, :n])
