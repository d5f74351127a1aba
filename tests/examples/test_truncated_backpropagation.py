"""The forecaster of the examples: its gradients against a Python loop, and what they store."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.support.compiled import temporary_of
from tests.support.reference import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double_precision")]

STEPS = 12


def some_series(example, steps=STEPS):
    values, _ = example.load()
    return example.stretches(values, 1, steps)[0].astype(float)


def a_forecaster(example):
    return jax.tree.map(lambda leaf: leaf.astype(float), example.Forecaster(jax.random.key(3), hidden=4))


def by_python(example, network, series, window):
    """The loss, with the states in a Python list."""
    states, errors = jnp.zeros((series.shape[1], network.cell.hidden_size)), []
    for number, (values, following) in enumerate(itertools.pairwise(series)):
        if number % window == 0:
            states = lax.stop_gradient(states)
        states, forecasts = jax.vmap(network)(states, values)
        errors.append(((forecasts - following) ** 2).mean())
    return jnp.stack(errors).mean()


@pytest.mark.parametrize("window", [1, 5, STEPS, STEPS + 1])
def test_gradients_of_windows_are_those_of_a_python_loop(example, window):
    network, series = a_forecaster(example), some_series(example)
    found = jax.jit(jax.value_and_grad(lambda n: example.loss(n, series, window)))(network)
    expected = jax.value_and_grad(lambda n: by_python(example, n, series, window))(network)
    assert_close(found, expected)


def test_memory_falls_with_the_window(example):
    """From all steps down to about their square root: below it, the states before windows are what takes room."""
    network, series = a_forecaster(example), some_series(example, 1000)

    def stored(window):
        return temporary_of(jax.grad(lambda n: example.loss(n, series, window)), network)

    by_window = [stored(w) for w in (1000, 200, 50, 20)]
    assert by_window == sorted(by_window, reverse=True)
    assert by_window[-1] < by_window[0] / 10
    assert by_window[-1] < stored(1) < by_window[0]
