"""Equinox modules in loops, and Equinox's transformations around them."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx
from tests.support.blocks import BLOCK, KEY, KEYS, Block, X, apply, arrays, fori_loop, python_loop, scan, while_loop
from tests.support.reference import assert_close

EACH_KIND = pytest.mark.parametrize("kind", ["auto", lx.Checkpointed(2)], ids=str)
EACH_LOOP = pytest.mark.parametrize("loop", [while_loop, fori_loop, scan])


# ---- where a module stands


@EACH_KIND
def test_stacked_layers_in_xs(kind: Any) -> None:
    layers = eqx.filter_vmap(Block)(KEYS)

    def loss(layers: Any, x: Array) -> Array:
        return (lx.scan(lambda x, layer: (layer(x), layer.width), x, layers, kind=kind)[0] ** 2).sum()

    def expected(layers: Any, x: Array) -> Array:
        for i in range(3):
            x = jax.tree.map(lambda leaf, i=i: leaf[i] if eqx.is_array(leaf) else leaf, layers)(x)
        return (x**2).sum()

    actual = eqx.filter_jit(eqx.filter_value_and_grad(loss))(layers, X)
    assert_close(actual, eqx.filter_jit(eqx.filter_value_and_grad(expected))(layers, X))


# ---- numbers in modules


class Count(eqx.Module):
    n: int
    x: Array
    rate: float = 0.5


@EACH_LOOP
def test_number_that_the_body_changes_becomes_an_array(loop: Any) -> None:
    step = lambda c: Count(c.n + 1, c.x * c.rate, c.rate)
    count = loop(step, Count(0, X))
    assert jax.typeof(count.n) == jax.typeof(jnp.asarray(3))
    assert (count.n, count.rate, type(count.rate)) == (3, 0.5, float)
    assert_close(count.x, X / 8)


# ---- modules as functions

FUNCTIONS: dict[str, Callable[[Block], Callable[..., Any]]] = {
    "bound method": lambda block: block.step,
    "module": lambda block: Stepper(block=block),
    "jax Partial": lambda block: jax.tree_util.Partial(Block.step, block),
    "filter_jit": lambda block: eqx.filter_jit(block.step),
}


class Stepper(eqx.Module):
    block: Block

    def __call__(self, x: Array, row: Array) -> tuple[Array, Array]:
        return self.block.step(x, row)


def test_body_that_is_a_part_of_a_module() -> None:
    def loss(block: Block, how: Any, run: Any = lx.scan) -> Array:
        x, ys = run(how(block), X, jnp.arange(9.0).reshape(3, 3) / 9)
        return (x**2).sum() + ys.sum()

    expected = eqx.filter_value_and_grad(loss)(BLOCK, lambda block: ft.partial(Block.step, block), jax.lax.scan)
    for how in FUNCTIONS.values():
        assert_close(eqx.filter_jit(eqx.filter_value_and_grad(loss))(BLOCK, how), expected)


# ---- transformations


def through(block: Block, x: Array, n: Any = 3) -> tuple[Block, Array]:
    return lx.fori_loop(0, n, lambda _, c: apply(c), (block, x), max_steps=5)


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "filter_hessian": lambda f: eqx.filter_hessian(lambda x: f(x).sum())(X),
    "filter_checkpoint": lambda f: eqx.filter_grad(lambda x: eqx.filter_checkpoint(f)(x).sum())(X),
    "filter_closure_convert": lambda f: eqx.filter_grad(lambda x: eqx.filter_closure_convert(f, X)(x).sum())(X),
}


@pytest.mark.parametrize("how", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_around_a_loop(how: Any) -> None:
    derivative = lambda run: eqx.filter_jit(lambda: how(lambda x: run(BLOCK, x)[1]))()
    assert_close(derivative(through), derivative(lambda block, x: python_loop(apply, (block, x))))


def test_ensemble_with_a_count_for_each_lane() -> None:
    blocks, counts = eqx.filter_vmap(Block)(KEYS), jnp.array([3, 0, 5])
    run = eqx.filter_vmap(through, in_axes=(eqx.if_array(0), None, 0), out_axes=eqx.if_array(0))
    out, x = eqx.filter_jit(run)(blocks, X, counts)
    assert eqx.tree_equal(out, blocks)
    assert_close(x[1], X)
    grad = eqx.filter_jit(eqx.filter_grad(lambda blocks: run(blocks, X, counts)[1].sum()))(blocks)
    alone = eqx.filter_jit(eqx.filter_grad(lambda block, n: through(block, X, n)[1].sum()))
    for i, n in enumerate(counts):
        block = jax.tree.map(lambda leaf, i=i: leaf[i] if eqx.is_array(leaf) else leaf, blocks)
        wanted = X
        for _ in range(int(n)):
            wanted = block(wanted)
        assert_close(x[i], wanted)
        assert_close(jax.tree.map(lambda g, i=i: g[i], grad), alone(block, n))


# ---- `eqx.nn.State` and `eqx.nn.BatchNorm`


class Normalised(eqx.Module):
    """A layer with a batch norm, and a state of its own that counts calls."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    calls: eqx.nn.StateIndex[Array]

    def __init__(self, mode: Any) -> None:
        self.linear = eqx.nn.Linear(3, 3, key=KEY)
        self.norm = eqx.nn.BatchNorm(3, "batch", momentum=0.5, mode=mode)
        self.calls = eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        state = state.set(self.calls, state.get(self.calls) + 1)
        return self.norm(jnp.sin(self.linear(x)), state)


BATCH = jnp.stack([X, 2 * X, jnp.cos(X)])


def over_batch(model: Normalised) -> Callable[[Any], Any]:
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return lambda carry: batched(*carry)


@pytest.mark.parametrize(("mode", "kind"), [("ema", "auto"), ("batch", lx.Checkpointed(2))], ids=str)
def test_state_in_the_carry(mode: str, kind: Any) -> None:
    model, state = eqx.nn.make_with_state(Normalised)(mode)

    def loss(model: Normalised, loop: Any, state: Any) -> Any:
        x, state = loop(over_batch(model), (BATCH, state))
        return (x**3).sum() + sum(leaf.sum() for leaf in jax.tree.leaves(state) if leaf.dtype == float), state

    run = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))
    (value, after), gradient = run(model, ft.partial(fori_loop, kind=kind), state)
    (wanted, wanted_after), wanted_gradient = run(model, python_loop, state)
    assert after.get(model.calls) == 3
    assert_close((value, arrays(gradient), after), (wanted, arrays(wanted_gradient), wanted_after))
