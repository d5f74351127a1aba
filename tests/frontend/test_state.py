"""`eqx.nn.State` and `eqx.nn.BatchNorm` through loops."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx
from tests.support.blocks import KEY, X, arrays, fori_loop, python_loop
from tests.support.reference import assert_close


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


def test_state_of_each_lane() -> None:
    model, state = eqx.nn.make_with_state(Normalised)("batch")

    def run(n: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        return lx.fori_loop(0, n, lambda _, carry: over_batch(model)(carry), (BATCH, state))

    _, after = eqx.filter_jit(jax.vmap(run, in_axes=(0, None)))(jnp.array([0, 2, 5]), state)
    assert after.get(model.calls).tolist() == [0, 2, 5]
    counter: Any = model.norm.batch_counter
    assert after.get(counter).tolist() == [0, 2, 5]


def test_batch_norm_over_the_lanes_of_a_loop() -> None:
    model, state = eqx.nn.make_with_state(Normalised)("batch")
    step = lambda _, carry: model(*carry)
    batch = ft.partial(jax.vmap, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
    found = batch(lambda x, state, n: lx.fori_loop(0, n, step, (x, state)))(BATCH, state, jnp.int32(3))
    assert_close(found, python_loop(over_batch(model), (BATCH, state)))


def test_state_of_another_model_shows_what_it_holds() -> None:
    _, state = eqx.nn.make_with_state(Normalised)("batch")
    model, _ = eqx.nn.make_with_state(Normalised)("batch")
    with pytest.raises(TypeError, match=r"got State .*Normalised\.calls.*expected .*Normalised\.norm"):
        fori_loop(lambda state: state.substate(model.calls), state)
