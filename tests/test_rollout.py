"""`rollout` is the Python loop that repeats a step on its own results, whatever it is given."""

import functools as ft
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import loopax as lx
from tests.support.compiled import whole_arrays_in_loops
from tests.support.complex_steps import gradient, hessian_product
from tests.support.problem import BOUND, LOSSY, XS, H, W, mixed
from tests.support.reference import assert_close

ROWS = 7
KEY = jax.random.key(5)
INPUTS = np.sin(np.arange(2.0 * ROWS)).reshape(ROWS, 2)
STATE, DIRECTION = np.array([0.3, -0.8]), np.array([0.6, 0.8])
START = np.array([[0.1, 0.2], [0.5, -0.4], [0.7, 0.9]])
slow = pytest.mark.slow


def step(state: Any, x: Any = None, *, history: Any = None, key: Any = None, noise: Any = None, xp: Any = jnp) -> Any:
    """Each of what there may be changes the output, which is also a row of the history."""
    y = xp.sin(2 * state) + 0.2
    if x is not None:
        y = y + x * state
    if history is not None:
        y = y + 0.5 * history[0] * history[-1]
    if key is not None:
        noise = jax.random.normal(key, y.shape)
    if noise is not None:
        y = y + 0.1 * noise
    return state + 0.3 * xp.cos(y), y


def stop(state: Any, y: Any) -> Any:
    """Whether the state has come far enough: after 3 steps or so."""
    return state.sum() + 0.01 * y.sum() > 0.8


@ft.cache
def noises() -> np.ndarray:
    """What the key of each step draws."""
    draw = lambda i: jax.random.normal(jax.random.fold_in(KEY, i), (2,))
    return np.asarray(jax.jit(jax.vmap(draw))(np.arange(ROWS)))


def rollout_of_lists(state: Any, length: int, **given: Any) -> Any:
    """The state (and the last rows), all outputs with zeros for those not taken, and the number of steps."""
    inputs, start, key, stop = (given.get(name) for name in ("inputs", "history", "key", "stop"))
    series = [] if start is None else list(start)
    outputs: list[Any] = []
    for i in range(length):
        x = None if inputs is None else inputs[i]
        history = None if start is None else series[-len(start) :]
        state, y = step(state, x, history=history, noise=None if key is None else noises()[i], xp=np)
        outputs.append(y)
        series.append(y)
        if stop is not None and stop(np.real(state), np.real(y)):
            break
    rows = np.stack([*outputs, *[np.zeros(2)] * (ROWS - len(outputs))])
    last = state if start is None else (state, np.stack(series[-len(start) :]))
    return last, rows, np.int32(len(outputs))


def of_loopax(state: Any, length: Any, history: Any = None, **options: Any) -> Any:
    window = None if history is None else lx.History(len(history), history)
    last, outputs, num_steps = lx.rollout(step, state, length, history=window, **options)
    return (last if history is None else (last[0], last[1].rows)), outputs, num_steps


def saved(result: Any, every: int) -> Any:
    last, rows, num_steps = result
    return last, rows[every - 1 :: every], num_steps


CASES = [
    dict(given)
    for given in product(
        *[
            [(name, value), (name, None)]
            for name, value in [("inputs", INPUTS), ("history", START), ("key", KEY), ("stop", stop)]
        ]
    )
]


def name_of(case: Any) -> str:
    return "+".join(name for name, value in case.items() if value is not None) or "nothing"


def is_odd(case: Any) -> bool:
    return sum(value is not None for value in case.values()) % 2 == 1


# Each two of inputs, history, key, stop and rare outputs meet.
EVERY = [
    pytest.param(case, every, id=f"{name_of(case)}-{every}")
    for number, case in enumerate(CASES)
    for every in [2 + number % 2 if is_odd(case) else 1]
]


@pytest.mark.parametrize(("given", "every"), EVERY)
def test_values(given: Any, every: int) -> None:
    """Every combination, all outputs or every second or third."""
    f = jax.jit(lambda n: of_loopax(STATE, n, **given, save_every=every, max_steps=ROWS))
    for length in (ROWS, 5):
        assert_close(f(jnp.int32(length)), saved(rollout_of_lists(STATE, length, **given), every))


def weighed(result: Any, xp: Any = jnp) -> Any:
    """A scalar that depends on everything, and on each output in another way."""
    last, rows, _ = result
    weights = np.cos(np.arange(1.0 * rows.size)).reshape(rows.shape)
    return (rows**2 * weights).sum() + sum(xp.sin(leaf).sum() for leaf in jax.tree.leaves(last))


ALL: dict[str, Any] = {"inputs": INPUTS, "history": START, "key": KEY}
SOME: list[dict[str, Any]] = [ALL, {**ALL, "stop": stop}, {"key": KEY}, {"inputs": INPUTS, "stop": stop}]


def parts_of(given: Any) -> dict[str, Any]:
    return {name: given[name] for name in ("inputs", "history") if name in given}


def gradient_of_lists(state: Any, length: int, every: int, given: Any) -> Any:
    """With respect to the state, the inputs and the history."""

    def f(**parts: Any) -> Any:
        return weighed(saved(rollout_of_lists(**{"state": state, "length": length, **given, **parts}), every), np)

    of = lambda name, value: gradient(lambda part: f(**{name: part}), value)
    return of("state", state), {name: of(name, part) for name, part in parts_of(given).items()}


def with_gradient(every: int, given: Any, **options: Any) -> Any:
    """The gradient, and all results."""

    def f(state: Any, parts: Any, length: Any) -> Any:
        result = of_loopax(state, length, **{**given, **parts}, save_every=every, max_steps=ROWS, **options)
        return weighed(result), result

    return lambda state, length: jax.grad(f, (0, 1), has_aux=True)(state, parts_of(given), length)


def expected(every: int, given: Any) -> Any:
    def of_lane(state: Any, length: int) -> Any:
        result = saved(rollout_of_lists(state, length, **given), every)
        return gradient_of_lists(state, length, every, given), result

    return of_lane


OF_SOME = [
    pytest.param(given, every, id=f"{name_of(given)}-{every}", marks=[] if n % 2 == (every == 3) else [slow])
    for n, given in enumerate(SOME)
    for every in (1, 3)
]


@pytest.mark.parametrize(("given", "every"), OF_SOME)
def test_gradients(given: Any, every: int) -> None:
    f = jax.jit(with_gradient(every, given))
    for length in (ROWS, 2):
        assert_close(f(STATE, jnp.int32(length)), expected(every, given)(STATE, length))


@pytest.mark.parametrize("kind", ["checkpointed", lx.Checkpointed(2), "bounded", "residuals"], ids=str)
def test_derivatives_of_each_kind(kind: Any) -> None:
    """Five of seven steps, with everything that there may be."""
    run = lambda state: of_loopax(state, jnp.int32(5), **ALL, save_every=2, max_steps=ROWS, kind=kind)
    of_lists = lambda state: weighed(saved(rollout_of_lists(state, 5, **ALL), 2), np)
    found = jax.jit(lambda state: jax.jvp(jax.grad(lambda s: weighed(run(s))), (state,), (DIRECTION,)))(STATE)
    assert_close(found, (gradient(of_lists, STATE), hessian_product(of_lists, STATE, DIRECTION)))


def test_as_many_outputs_as_are_asked_for() -> None:
    """One for each row of the inputs, else for each of a static length, else up to the bound."""

    def outputs(every: int = 1, **options: Any) -> int:
        return len(jax.eval_shape(lambda: lx.rollout(step, STATE, save_every=every, **options).outputs))

    assert [outputs(every, inputs=INPUTS, length=3) for every in (1, 2, 3, 7, 8)] == [7, 3, 2, 1, 0]
    assert [outputs(every, length=5) for every in (1, 2, 3, 5, 6)] == [5, 2, 1, 1, 0]
    assert [outputs(every, stop=stop, max_steps=20) for every in (1, 2, 3)] == [20, 10, 6]
    assert [outputs(every, inputs=INPUTS) for every in (1, 2)] == [7, 3]
    assert len(lx.rollout(step, STATE, inputs=INPUTS, length=3, save_every=8).outputs) == 0


def test_until_it_stops() -> None:
    """Without a length, and without a bound where nothing is saved."""
    _, rows, num_steps = rollout_of_lists(STATE, ROWS, stop=stop)
    assert 1 < num_steps < ROWS
    done, info = lx.rollout(step, STATE, stop=stop, max_steps=ROWS, info=True)
    assert_close((done.outputs, done.num_steps, info.num_steps), (rows, num_steps, num_steps))
    assert not info.limit_reached
    silent = lambda state: (step(state)[0], None)
    done = lx.rollout(silent, STATE, stop=lambda state, _: state.sum() > 0.8)
    assert done.outputs is None
    assert lx.rollout(silent, STATE, stop=lambda state, _: state.sum() > 0.8, save_every=2).num_steps == done.num_steps


# ---- what it costs


@pytest.mark.parametrize("kind", [lx.Checkpointed(8), lx.Bounded(), lx.Residuals()])
def test_what_is_not_saved_takes_no_memory(kind: Any) -> None:
    def temporary(steps: int, every: int) -> int:
        f = lambda x: lx.rollout(lambda x: (x * 0.5, jnp.full(4096, x)), x, steps, save_every=every, kind=kind)
        analysis = jax.jit(lambda x: f(x).outputs.sum()).lower(1.0).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary(64, 32) < temporary(64, 1) / 8


# ---- kinds with an inverse, and rare outputs


def some_outputs(kind: Any, **options: Any) -> Any:
    def loss(w: Array, h: Array, n: Any) -> Array:
        f = lambda c, x: (new := LOSSY.take(w, c, x), LOSSY.row(x, new))
        back, record = lambda c, x, row: LOSSY.back(w, c, x, row), lambda before, after, x: LOSSY.lost(before)
        done = lx.rollout(f, LOSSY.start(h), n, inputs=XS, save_every=3, kind=kind(back, record), **options)
        return mixed((done.state[:2], done.outputs))

    return jax.jit(jax.grad(loss, (0, 1)))


@pytest.mark.parametrize("stop", [None, lambda c, y: abs(c[0]).max() > 2.0], ids=["", "stop"])
@pytest.mark.parametrize("kind", [{"rtol": 1e-9}, pytest.param({"checkpoints": 2}, marks=pytest.mark.slow)], ids=str)
def test_an_inverse_of_states(stop: Any, kind: dict[str, Any]) -> None:
    """The state alone is walked back; outputs that were saved, and their number, are loopax's own."""
    found = some_outputs(lambda back, record: lx.Reversible(back, record=record, **kind), stop=stop)
    expected = some_outputs(lambda *_: lx.Bounded(), stop=stop)
    for n in (0, 1, 7, BOUND):
        assert_close(found(W, H, n), expected(W, H, n))


def test_a_history_forgets() -> None:
    history = lx.History(4, like=H)
    pattern = r"rollout\(history=\.\.\.\), which forgets rows, does not take a kind that brings an inverse"
    with pytest.raises(NotImplementedError, match=pattern):
        lx.rollout(lambda s, history: (s, s), H, 3, history=history, kind=lx.Reversible(lambda s: s))


@pytest.mark.parametrize("every", [1, 2])
def test_a_second_eager_call_does_not_trace_again(every: int) -> None:
    traces = []

    def counted(state: Any, x: Any, history: Any, key: Any) -> Any:
        traces.append(1)
        return step(state, x, history=history, key=key)

    for n in range(1, 5):
        options = {"history": lx.History(3, START), "key": KEY, "stop": stop, "save_every": every}
        lx.rollout(counted, STATE, jnp.int32(n), inputs=INPUTS, **options)
        assert len(traces) <= 2, n


@pytest.mark.parametrize("rows", [300, 5000])
def test_a_step_touches_no_more_of_a_longer_history(rows):
    """Neither the values nor the cotangents of all rows are copied or computed in a step of the gradient."""

    def total(weight: Any, start: Any, n: Any) -> Any:
        step = lambda _, history: (None, jnp.tanh(weight * history[-1] * history[-3]))
        history = lx.History(3, start)
        return (lx.rollout(step, None, n, history=history, max_steps=rows, throw=False).outputs ** 2).sum()

    text = jax.jit(jax.grad(total, (0, 1))).lower(jnp.ones(2), jnp.ones((3, 2)), jnp.int32(7)).compile().as_text() or ""
    assert f"[{rows},2]" in text
    assert not whole_arrays_in_loops(text, rows, 2)
