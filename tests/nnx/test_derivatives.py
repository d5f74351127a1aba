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
from tests.nnx.cells import (
    COUNTS,
    KINDS,
    STEPS,
    Cell,
    Tied,
    X,
    apply,
    cell,
    fori_loop,
    python,
    same,
    scan,
    while_loop,
)
from tests.support import complex_steps


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


def test_gradient_under_jax_grad() -> None:
    """Of a module as the pytree that it is."""
    graph, params, rest = nnx.split(cell(), nnx.Param, ...)
    loss = lambda params, run: loss_of(run, nnx.merge(graph, params, rest, copy=True), X)
    run = lambda model, x: scan(STEPS, apply, (model, x))
    gradient = jax.jit(jax.grad(loss), static_argnums=1)(params, run)
    same([gradient], [jax.jit(jax.grad(loss), static_argnums=1)(params, partial(python, STEPS))])


def of_kernel(run: Any, kernel: Any) -> Any:
    model = Cell()
    model.linear.kernel[...] = kernel
    return loss_of(run, model, X)


KERNEL, DIRECTION = np.sin(np.arange(1.0, 10.0)).reshape(3, 3), np.cos(np.arange(9.0)).reshape(3, 3)


def along(f: Any) -> Any:
    """The derivative in one direction."""
    return lambda kernel: jax.jvp(f, (kernel,), (DIRECTION,))[1]


@ft.cache
def second_of_python() -> Any:
    return jax.jit(along(jax.grad(partial(of_kernel, partial(python, STEPS)))))(KERNEL)


WAYS: dict[str, Any] = {
    "forward over reverse": lambda f: along(jax.grad(f)),
    "reverse over forward": lambda f: jax.grad(along(f)),
    "reverse over reverse": lambda f: jax.grad(lambda kernel: (jax.grad(f)(kernel) * DIRECTION).sum()),
}
FAST, *SLOW = WAYS


@pytest.mark.parametrize("way", [FAST, *[pytest.param(way, marks=pytest.mark.slow) for way in SLOW]])
def test_second_derivatives(way: str) -> None:
    f = partial(of_kernel, lambda model, x: while_loop(STEPS, apply, (model, x)))
    np.testing.assert_allclose(jax.jit(WAYS[way](f))(KERNEL), second_of_python(), rtol=1e-9)


def test_training_with_an_optimizer_in_the_carry() -> None:
    """The body takes gradients, and changes two objects that are tied to each other."""

    def step(carry: Any, x: Any) -> Any:
        model, optimizer = carry
        loss, gradient = nnx.value_and_grad(lambda model: ((model(x) - 1.0) ** 2).sum())(model)
        optimizer.update(model, gradient)
        return carry, loss

    def start() -> Any:
        model = cell()
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    xs = np.arange(12.0).reshape(4, 3)
    objects, expected = start(), start()
    _, losses = nnx.jit(lambda objects, xs: lx.scan(step, objects, xs))(objects, xs)
    once = nnx.jit(step)
    plain = [once(expected, x)[1] for x in xs]
    np.testing.assert_allclose(losses, plain)
    same(objects, expected)
    assert objects[1].step[...] == 4


def test_gradient_of_a_shared_variable() -> None:
    def loss(a: Any) -> Any:
        tied = Tied()
        tied.a[...] = a

        def step(_: Any, carry: Any) -> Any:
            tied, x = carry
            return tied, tied.a[...] * jnp.sin(tied.b[...] * x)

        return lx.fori_loop(0, STEPS, step, (tied, jnp.float64(0.5)))[1]

    def plain(a: Any) -> Any:
        x = 0.5
        for _ in range(STEPS):
            x = a * np.sin(a * x)
        return x

    found = jax.jit(lambda a: (jax.grad(loss)(a), jax.jacfwd(loss)(a)))(1.5)
    np.testing.assert_allclose(found, [complex_steps.gradient(plain, 1.5)] * 2)


# ---- randomness


def mask(carry: Any, _: Any) -> Any:
    dropout, x = carry
    dropped = dropout(jnp.ones(64))
    return (dropout, x * dropped), dropped > 0


def test_every_step_has_a_dropout_mask_of_its_own() -> None:
    dropout: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    _, masks = nnx.jit(lambda dropout: lx.scan(mask, (dropout, jnp.ones(64)), length=8))(dropout)
    assert len({tuple(row.tolist()) for row in masks}) == 8
    assert dropout.rngs.count[...] == 8


def test_masks_of_the_backward_pass_are_those_of_the_forward_pass() -> None:
    """The derivative of a product of masks is the product of masks."""

    def last(x: Any, dropout: Any, kind: Any) -> Any:
        return lx.fori_loop(0, 3, lambda _, c: mask(c, None)[0], (dropout, x), kind=kind)[1]

    def forward_and_back(x: Any, kind: Any) -> Any:
        y, pull = jax.vjp(lambda x: last(x, nnx.Dropout(0.5, rngs=nnx.Rngs(0)), kind), x)
        return y, pull(x)[0]

    for y, pulled in jax.jit(lambda x: [forward_and_back(x, kind) for kind in KINDS])(np.ones(64)):
        assert np.any(np.asarray(y) > 0)
        np.testing.assert_array_equal(pulled, y)


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
