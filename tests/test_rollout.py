"""`rollout` is the Python loop that repeats a step on its own results, whatever it is given."""

from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import loopax as lx
from tests.support.limited_loops import raises
from tests.support.reference import assert_close

ROWS = 7
KEY = jax.random.key(5)
INPUTS = jnp.sin(jnp.arange(2.0 * ROWS)).reshape(ROWS, 2)
STATE = jnp.array([0.3, -0.8])
START = jnp.array([[0.1, 0.2], [0.5, -0.4], [0.7, 0.9]])
LENGTHS = jnp.array([7, 0, 3, 5], jnp.int32)
STATES = jnp.stack([STATE, 2 * STATE, -STATE, STATE - 0.1])


def step(state: Any, x: Any = None, *, history: Any = None, key: Any = None) -> Any:
    """Each of what there may be changes the output, which is also a row of the history."""
    y = jnp.sin(2 * state) + 0.2
    if x is not None:
        y = y + x * state
    if history is not None:
        y = y + 0.5 * history[0] * history[-1]
    if key is not None:
        y = y + 0.1 * jax.random.normal(key, y.shape)
    return state + 0.3 * jnp.cos(y), y


def stop(state: Any, y: Any) -> Any:
    """Whether the state has come far enough: after 3 steps or so."""
    return state.sum() + 0.01 * y.sum() > 0.8


def rollout_of_lists(state: Any, length: int, **given: Any) -> Any:
    """The state (and the last rows), all outputs with zeros for those not taken, and the number of steps."""
    inputs, start, key, stop = (given.get(name) for name in ("inputs", "history", "key", "stop"))
    series = None if start is None else list(start)
    outputs: list[Any] = []
    for i in range(length):
        row = () if inputs is None else (inputs[i],)
        window = {} if series is None or start is None else {"history": series[-len(start) :]}
        state, y = step(state, *row, **window, **({} if key is None else {"key": jax.random.fold_in(key, i)}))
        outputs.append(y)
        if series is not None:
            series.append(y)
        if stop is not None and bool(stop(state, y)):
            break
    rows = jnp.stack([*outputs, *[jnp.zeros(2)] * (ROWS - len(outputs))])
    last = state if series is None or start is None else (state, jnp.stack(series[-len(start) :]))
    return last, rows, jnp.int32(len(outputs))


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
NAMES = ["+".join(name for name, value in case.items() if value is not None) or "nothing" for case in CASES]
each_case = pytest.mark.parametrize("given", CASES, ids=NAMES)


@each_case
def test_values(given: Any) -> None:
    """Every combination, a static and a traced length, all outputs or every second or third."""
    wanted = rollout_of_lists(STATE, ROWS, **given)
    assert_close(of_loopax(STATE, ROWS, **given), wanted)
    shorter = rollout_of_lists(STATE, 5, **given)
    for every in (1, 2, 3):
        f = jax.jit(lambda n, every=every: of_loopax(STATE, n, **given, save_every=every, max_steps=ROWS))
        assert_close(f(jnp.int32(ROWS)), saved(wanted, every))
        assert_close(f(jnp.int32(5)), saved(shorter, every))


def weighed(result: Any) -> Any:
    """A scalar that depends on everything, and on each output in another way."""
    last, rows, _ = result
    weights = jnp.cos(jnp.arange(1.0 * rows.size)).reshape(rows.shape)
    return (rows**2 * weights).sum() + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(last))


ALL: dict[str, Any] = {"inputs": INPUTS, "history": START, "key": KEY}
SOME: list[dict[str, Any]] = [ALL, {**ALL, "stop": stop}, {"key": KEY}, {"inputs": INPUTS, "stop": stop}]
each_of_some = pytest.mark.parametrize("given", SOME, ids=["all", "all+stop", "key", "inputs+stop"])


def gradient_of_lists(state: Any, length: int, every: int, given: Any) -> Any:
    """With respect to the state, the inputs and the history."""
    parts = {name: given[name] for name in ("inputs", "history") if name in given}
    f = lambda state, parts: weighed(saved(rollout_of_lists(state, length, **{**given, **parts}), every))
    return jax.grad(f, (0, 1))(state, parts)


def gradient(every: int, given: Any, **options: Any) -> Any:
    parts = {name: given[name] for name in ("inputs", "history") if name in given}

    def f(state: Any, parts: Any, length: Any) -> Any:
        return weighed(of_loopax(state, length, **{**given, **parts}, save_every=every, max_steps=ROWS, **options))

    return lambda state, length: jax.grad(f, (0, 1))(state, parts, length)


@each_of_some
@pytest.mark.parametrize("every", [1, 3])
def test_gradients(given: Any, every: int) -> None:
    f = jax.jit(gradient(every, given))
    for length in (ROWS, 2):
        assert_close(f(STATE, jnp.int32(length)), gradient_of_lists(STATE, length, every, given))


@pytest.mark.parametrize("kind", ["checkpointed", lx.Checkpointed(2), "bounded", "residuals"])
@pytest.mark.parametrize("every", [1, 2])
def test_kinds_and_hessians(kind: Any, every: int) -> None:
    f = lambda state: weighed(of_loopax(state, jnp.int32(5), **ALL, save_every=every, max_steps=ROWS, kind=kind))
    of_lists = lambda state: weighed(saved(rollout_of_lists(state, 5, **ALL), every))
    assert_close(jax.jit(jax.grad(f))(STATE), jax.grad(of_lists)(STATE))
    assert_close(jax.jit(jax.hessian(f))(STATE), jax.jit(jax.hessian(of_lists))(STATE))


@each_of_some
@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
@pytest.mark.parametrize("every", [1, 3])
def test_lanes_with_lengths_of_their_own(given: Any, lanes: Any, every: int) -> None:
    f = lambda state, n: of_loopax(state, n, **given, save_every=every, max_steps=ROWS, lanes=lanes)
    pairs = [(state, int(n)) for state, n in zip(STATES, LENGTHS, strict=True)]
    stacked = lambda results: jax.tree.map(lambda *lanes: jnp.stack(lanes), *results)
    wanted = stacked([saved(rollout_of_lists(*pair, **given), every) for pair in pairs])
    assert_close(jax.jit(jax.vmap(f))(STATES, LENGTHS), wanted)
    wanted = stacked([gradient_of_lists(*pair, every, given) for pair in pairs])
    assert_close(jax.jit(jax.vmap(gradient(every, given, lanes=lanes)))(STATES, LENGTHS), wanted)


def test_as_many_outputs_as_are_asked_for() -> None:
    """One for each row of the inputs, else for each of a static length, else up to the bound."""
    outputs = lambda every=1, **options: len(lx.rollout(step, STATE, save_every=every, **options).outputs)
    assert [outputs(every, inputs=INPUTS, length=3) for every in (1, 2, 3, 7, 8)] == [7, 3, 2, 1, 0]
    assert [outputs(every, length=5) for every in (1, 2, 3, 5, 6)] == [5, 2, 1, 1, 0]
    assert [outputs(every, stop=stop, max_steps=20) for every in (1, 2, 3)] == [20, 10, 6]
    assert [outputs(every, inputs=INPUTS) for every in (1, 2)] == [7, 3]


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


def test_no_steps() -> None:
    """The state is the first one."""
    for every in (1, 2):
        assert_close(of_loopax(STATE, 0, save_every=every), (STATE, jnp.zeros((0, 2)), jnp.int32(0)))


def test_autoregression_without_a_state() -> None:
    f = lambda start: lx.rollout(
        lambda _, history: (None, jnp.sin(history[0]) + history[-1]), None, 6, history=lx.History(3, start)
    )
    series = list(START)
    for _ in range(6):
        series.append(jnp.sin(series[-3]) + series[-1])
    done = f(START)
    assert_close((done.state[1].rows, done.outputs), (jnp.stack(series[-3:]), jnp.stack(series[3:])))


def test_goes_on_from_where_it_was() -> None:
    whole = lx.rollout(step, STATE, 7, history=lx.History(3, START))
    first = lx.rollout(step, STATE, 4, history=lx.History(3, START))
    state, history = first.state
    second = lx.rollout(step, state, 3, history=history)
    assert_close(second.state[1].rows, whole.state[1].rows)
    assert_close(jnp.concatenate([first.outputs, second.outputs]), whole.outputs)


@pytest.mark.parametrize("every", [1, 2])
def test_outputs_are_what_scan_makes_of_them(every: int) -> None:
    """Pytrees, bools, and rows of a state that is promoted from an integer."""
    count = lambda state: (state * 1.5, {"state": state, "is_large": state > 4, "flag": True})
    done = lx.rollout(count, 1, 4, save_every=every)
    assert done.outputs["state"].tolist() == [1.0, 1.5, 2.25, 3.375][every - 1 :: every]
    assert done.outputs["is_large"].dtype == done.outputs["flag"].dtype == bool


class Model(nnx.Module):
    def __init__(self) -> None:
        self.calls = nnx.Variable(jnp.array(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.weight = nnx.Param(jnp.array(0.7))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.dropout(x * self.weight[...] + 1.0)


@pytest.mark.parametrize("every", [1, 2])
def test_nnx_modules_are_changed_in_place(every: int) -> None:
    def take(state: Any) -> Any:
        model, x = state
        x = model(x)
        return (model, x), x

    model, other = Model(), Model()
    done = lx.rollout(take, (model, jnp.ones(8)), 5, save_every=every)
    x, rows = jnp.ones(8), []
    for _ in range(5):
        x = other(x)
        rows.append(x)
    assert done.state[0] is model
    assert model.calls[...] == 5
    assert_close((done.state[1], done.outputs), (x, jnp.stack(rows)[every - 1 :: every]))


def test_nnx_modules_in_the_inputs() -> None:
    layers = nnx.vmap(lambda _: Model())(jnp.arange(4))
    done = lx.rollout(lambda x, layer: (layer(x), x), jnp.ones(3), jnp.int32(3), inputs=layers, save_every=2)
    assert done.outputs.shape == (2, 3)
    assert layers.calls[...].tolist() == [1, 1, 1, 0]


# ---- what it costs


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("given", [{}, {"inputs": INPUTS, "history": START}], ids=["alone", "inputs+history"])
def test_one_compilation_for_all_lengths(every: int, given: Any) -> None:
    traces = []

    def counted(*row: Any, **others: Any) -> Any:
        traces.append(1)
        return step(*row, **others)

    @jax.jit
    def f(n: Any) -> Any:
        window = lx.History(3, START) if given else None
        options = {"inputs": given.get("inputs"), "history": window, "max_steps": ROWS, "save_every": every}
        return lx.rollout(counted, STATE, n, **options).num_steps

    assert f(jnp.int32(0)) == 0
    first = len(traces)
    assert first <= 2
    assert [int(f(jnp.int32(n))) for n in range(ROWS)] == list(range(ROWS))
    assert len(traces) == first


@pytest.mark.parametrize("every", [1, 2])
def test_a_second_eager_call_does_not_trace_again(every: int) -> None:
    traces = []

    def counted(state: Any, x: Any, history: Any, key: Any) -> Any:
        traces.append(1)
        return step(state, x, history=history, key=key)

    def call(n: int) -> int:
        window = lx.History(3, START)
        lx.rollout(counted, STATE, jnp.int32(n), inputs=INPUTS, history=window, key=KEY, stop=stop, save_every=every)
        return len(traces)

    first = call(1)
    assert first <= 2
    assert [call(n) for n in (2, 3, 4)] == [first] * 3


@pytest.mark.parametrize("kind", [lx.Checkpointed(8), lx.Bounded(), lx.Residuals()])
def test_what_is_not_saved_takes_no_memory(kind: Any) -> None:
    def temporary(steps: int, every: int) -> int:
        f = lambda x: lx.rollout(lambda x: (x * 0.5, jnp.full(4096, x)), x, steps, save_every=every, kind=kind)
        analysis = jax.jit(lambda x: f(x).outputs.sum()).lower(1.0).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary(64, 32) < temporary(64, 1) / 8


# ---- errors


def silent(state: Any, *_: Any, **__: Any) -> Any:
    return state, None


def test_inputs_shorter_than_the_length() -> None:
    with raises(ValueError, "rollout(length=...): got 8", "inputs has 7 rows"):
        lx.rollout(step, STATE, 8, inputs=INPUTS)
    f = eqx.filter_jit(lambda n, every: lx.rollout(step, STATE, n, inputs=INPUTS, save_every=every).num_steps)
    for every in (1, 2):
        with raises(eqx.EquinoxRuntimeError, "loopax.rollout at ", "): `length`", "inputs has 7 rows"):
            f(jnp.int32(8), every)
        with raises(eqx.EquinoxRuntimeError, "loopax.rollout at ", "): `length` is negative"):
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


def test_several_steps_at_a_time() -> None:
    for every in (1, 2):
        wanted = saved(rollout_of_lists(STATE, ROWS, **ALL), every)
        assert_close(of_loopax(STATE, ROWS, **ALL, save_every=every, unroll=3), wanted)
    with raises(ValueError, "rollout(unroll=3, stop=...)"):
        lx.rollout(step, STATE, 4, stop=stop, unroll=3)
