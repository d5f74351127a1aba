"""What a rollout refuses, and what it says then."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import raises

STATE = np.array([0.3, -0.8])
START = np.array([[0.1, 0.2], [0.5, -0.4], [0.7, 0.9]])
INPUTS = np.sin(np.arange(14.0)).reshape(7, 2)


def step(state: Any, x: Any = None) -> Any:
    y = jnp.sin(2 * state) + (0.2 if x is None else x * state)
    return state + 0.3 * jnp.cos(y), y


def stop(state: Any, y: Any) -> Any:
    """After 3 steps or so."""
    return state.sum() + 0.01 * y.sum() > 0.8


def silent(state: Any, *_: Any, **__: Any) -> Any:
    return state, None


def test_inputs_shorter_than_the_length() -> None:
    with raises(ValueError, "rollout(length=...): got 8", "inputs has 7 rows"):
        lx.rollout(step, STATE, 8, inputs=INPUTS)
    f = eqx.filter_jit(lambda n, every: lx.rollout(step, STATE, n, inputs=INPUTS, save_every=every).num_steps)
    for every in (1, 2):
        with raises(eqx.EquinoxRuntimeError, "loopax.rollout at ", "): `length`", "inputs has 7 rows"):
            f(jnp.int32(8), every)
        with raises(eqx.EquinoxRuntimeError, "loopax.rollout at ", "): `length` ("):
            f(jnp.int32(-1), every)


def test_inputs_of_different_lengths() -> None:
    with raises(ValueError, "rollout", "every array of inputs", "['a']: 3 rows", "['b']: 2 rows"):
        lx.rollout(silent, STATE, inputs={"a": jnp.ones(3), "b": jnp.ones(2)})
    with raises(ValueError, "rollout reads inputs row by row", "inputs itself"):
        lx.rollout(silent, STATE, inputs=jnp.float64(1.0))


@pytest.mark.parametrize(
    ("every", "error"),
    [(0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError), (jnp.int32(2), TypeError)],
)
def test_save_every_is_a_positive_int(every: Any, error: Any) -> None:
    with raises(error, "rollout(save_every=...)"):
        lx.rollout(step, STATE, 4, save_every=every)


@pytest.mark.parametrize("history", [START, [1.0], lx.Buffer(3, like=1.0)])
def test_history_is_one(history: Any) -> None:
    with raises(TypeError, "rollout(history=...)", "loopax.History"):
        lx.rollout(step, STATE, 4, history=history)


@pytest.mark.parametrize("every", [1, 2])
def test_outputs_that_are_no_rows_of_the_history(every: int) -> None:
    window = lx.History(2, jnp.ones((2, 3)))
    with raises(TypeError, "the row does not match the others", "float64[2], expected float64[3]"):
        lx.rollout(lambda state, history: (state, state), STATE, 4, history=window, save_every=every)


@pytest.mark.parametrize("every", [1, 2])
def test_no_way_to_know_how_many(every: int) -> None:
    with raises(ValueError, "rollout does not know how many steps", "inputs has no arrays", "`length`", "`stop`"):
        lx.rollout(step, STATE, save_every=every)
    says = [
        "rollout has no static capacity for outputs",
        "inputs has no arrays",
        "max_steps=",
        "(state, None) from step",
    ]
    with raises(ValueError, *says):
        lx.rollout(step, STATE, stop=stop, save_every=every)
    with raises(ValueError, *says):
        jax.jit(lambda n: lx.rollout(step, STATE, n, save_every=every))(3)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("result", "got"), [(1.0, "float"), ((1.0, 2.0, 3.0), "a tuple of 3"), ({}, "dict")])
def test_a_step_returns_a_pair(every: int, result: Any, got: str) -> None:
    with raises(TypeError, "step of rollout must return a pair (state, output)", got, "(state, None)"):
        lx.rollout(lambda _: result, STATE, 4, save_every=every)


@pytest.mark.parametrize("every", [1, 2])
def test_a_state_that_changes_its_type(every: int) -> None:
    with raises(TypeError, "step of rollout", ".state['x']: got float64[3], expected float64[2]"):
        lx.rollout(lambda state: ({"x": jnp.ones(3)}, None), {"x": STATE}, 4, save_every=every)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("result", [1.0, jnp.ones(2, bool), None, (True,)])
def test_stop_is_one_bool(every: int, result: Any) -> None:
    with raises(TypeError, "stop of rollout must return one bool"):
        lx.rollout(step, STATE, 4, stop=lambda state, y: result, save_every=every)


@pytest.mark.parametrize("output", ["abc", jax.random.key(0), {"f": print}])
def test_what_is_saved_now_and_then_is_an_array(output: Any) -> None:
    with raises(TypeError, "rollout(save_every=...): the output of step", "arrays of numbers"):
        lx.rollout(lambda state: (state, output), STATE, 4, save_every=2)


def test_functions_are_functions() -> None:
    with raises(TypeError, "step of rollout", "callable"):
        lx.rollout(STATE, STATE, 4)  # pyright: ignore[reportArgumentType]
    with raises(TypeError, "stop of rollout", "callable"):
        lx.rollout(step, STATE, 4, stop=True)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("every", [1, 2])
def test_a_bound_that_stops_it(every: int) -> None:
    with raises(ValueError, "loopax.rollout: max_steps=3 stopped"):
        lx.rollout(step, STATE, 4, max_steps=3, save_every=every)
    with raises(eqx.EquinoxRuntimeError, "loopax.rollout at ", "test_a_bound_that_stops_it): max_steps=2 stopped"):
        lx.rollout(step, STATE, stop=stop, max_steps=2, save_every=every)
    done, info = lx.rollout(step, STATE, stop=stop, max_steps=2, save_every=every, throw=False, info=True)
    assert info.limit_reached
    assert done.num_steps == 2


def test_several_steps_at_a_time_and_a_stop() -> None:
    with raises(ValueError, "rollout(unroll=3, stop=...)"):
        lx.rollout(step, STATE, 4, stop=stop, unroll=3)
