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


@EACH_LOOP
def test_in_the_carry_everything_but_arrays_stays_what_it_is(loop: Any) -> None:
    def step(state: Any) -> Any:
        block, _ = state
        assert (type(block.width), type(block.dropout.p), type(block.dropout.inference)) == (int, float, bool)
        return apply(state)

    block, x = eqx.filter_jit(loop)(step, (BLOCK, X))
    assert eqx.tree_equal(block, BLOCK)
    assert_close(x, python_loop(apply, (BLOCK, X))[1])


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


def test_modules_in_ys_are_those_of_filter_vmap() -> None:
    _, blocks = lx.scan(lambda c, key: (c, Block(key)), None, KEYS)
    expected = eqx.filter_vmap(Block)(KEYS)
    assert_close(arrays(blocks), arrays(expected))
    assert eqx.tree_equal(*(eqx.filter(tree, eqx.is_array, inverse=True) for tree in (blocks, expected)))
    run = eqx.filter_vmap(lambda block, x: block(x), in_axes=(eqx.if_array(0), None))
    assert_close(run(blocks, X), run(expected, X))


@EACH_KIND
def test_closed_over(kind: Any) -> None:
    loss = lambda block: (fori_loop(block, X, kind=kind) ** 2).sum()
    expected = lambda block: (python_loop(block, X) ** 2).sum()
    assert_close(eqx.filter_jit(eqx.filter_grad(loss))(BLOCK), eqx.filter_grad(expected)(BLOCK))


def test_shared_layers_and_enumerations_in_the_carry() -> None:
    class Result(eqx.Enumeration):
        running = "running"
        done = "done"

    pair = eqx.nn.Shared([BLOCK, BLOCK], where=lambda ls: ls[1].linear, get=lambda ls: ls[0].linear)

    def step(state: Any) -> Any:
        layers, result, x = state
        first, second = layers()
        x = second(first(x))
        return layers, Result.where(x.sum() > 4.0, Result.done, result), x

    layers, result, x = fori_loop(step, (pair, Result.running, X))
    assert eqx.tree_equal(layers, pair)
    assert_close(x, python_loop(lambda x: BLOCK(BLOCK(x)), X))
    assert bool(result == (Result.done if x.sum() > 4.0 else Result.running))


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


def test_number_that_the_body_takes_for_an_array_is_one() -> None:
    as_array = lambda c: Count(c.n, c.x + c.n.astype(float), 1.0 / c.rate)
    count = fori_loop(as_array, Count(2, X, 0.0))
    assert_close((count.x, count.rate), (X + 6, jnp.asarray(jnp.inf)))


def scaled(count: Count) -> Count:
    scale = 3.0 if count.n is True else float(count.n)
    return Count(count.n, count.x * scale * count.rate, count.rate)


def test_numbers_that_differ_between_calls_of_one_body() -> None:
    run = lambda n, rate: fori_loop(scaled, Count(n, X, rate)).x
    assert_close(run(1, 1), X)
    assert_close(run(1, 2.0), 8 * X)
    assert_close(run(2, 1.0), 8 * X)
    assert_close(run(True, 1.0), 27 * X)


def test_error_of_a_body_with_numbers_is_its_first() -> None:
    def step(count: Count) -> Count:
        raise ValueError(f"a mistake in a body that is given {type(count.n).__name__}")

    with pytest.raises(ValueError, match="given int"):
        fori_loop(step, Count(0, X))


# ---- training in a loop


# ---- modules as functions

FUNCTIONS: dict[str, Callable[[Block], Callable[..., Any]]] = {
    "bound method": lambda block: block.step,
    "module": lambda block: Stepper(block=block),
    "eqx.Partial": lambda block: eqx.Partial(Block.step, block),
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


@pytest.mark.parametrize("make", [eqx.Partial, jax.tree_util.Partial])
def test_partial_in_the_carry(make: Any) -> None:
    function = make(jnp.multiply, jnp.float64(2.0))
    out, x = fori_loop(apply, (function, X))
    assert jax.tree.structure(out) == jax.tree.structure(function)
    assert_close(x, 8 * X)


# ---- transformations


def through(block: Block, x: Array, n: Any = 3) -> tuple[Block, Array]:
    return lx.fori_loop(0, n, lambda _, c: apply(c), (block, x), max_steps=5)


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "filter_hessian": lambda f: eqx.filter_hessian(lambda x: f(x).sum())(X),
    "filter_vjp": lambda f: eqx.filter_vjp(f, X)[1](X),
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


# ---- dropout


def random_bits(model: Block) -> bool:
    """Whether a loop over the model draws random bits."""

    def run(x: Array) -> Array:
        step = lambda i, state, key: (state[0], state[0](state[1], key=key))
        return lx.fori_loop(0, 3, step, (model, x), key=KEY)[1]

    program = str(jax.make_jaxpr(run)(X))
    return "random_bits" in program or "threefry2x32" in program


def test_dropout_draws_nothing_where_it_has_nothing_to_do() -> None:
    assert random_bits(Block(KEY, inference=False))
    assert not random_bits(eqx.nn.inference_mode(Block(KEY, inference=False)))
    assert not random_bits(Block(KEY, rate=0.0, inference=False))


def test_body_that_changes_a_flag_is_told_which() -> None:
    def step(_: Any, state: Any) -> Any:
        model, x = state
        return eqx.nn.inference_mode(model, value=False), model(x, key=KEY)

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        lx.fori_loop(0, 3, step, (BLOCK, X))
    assert f"step at {__file__}:" in str(error.value)
    assert "the argument state[0].dropout.inference." in str(error.value)
    notes = "\n".join(error.value.__notes__)
    assert "body_fun of fori_loop does not return these Python values" in notes
    assert "[0].dropout.inference: got bool False, expected bool True" in notes
