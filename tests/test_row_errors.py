"""What buffers, histories and rollouts refuse, and what they say then, beside what `docs/errors.md` has."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src import history as module
from tests.support.limited_loops import eagerly, raises
from tests.support.reference import assert_close

STATE, ROWS = np.array([0.3, -0.8]), np.array([[0.1, 0.2], [0.5, -0.4], [0.7, 0.9]])
INPUTS = np.sin(np.arange(14.0)).reshape(7, 2)


@pytest.fixture(params=["shifted", "ring"])
def storage(request: Any, monkeypatch: Any) -> str:
    """Small windows are shifted; with no limit on what is small, they are rings."""
    if request.param == "ring":
        monkeypatch.setattr(module, "RING_BYTES", 0)
    return request.param


def buffer(*rows: float, capacity: int = 3) -> Any:
    found = lx.Buffer(capacity, like=1.0)
    for row in rows:
        found = found.append(row)
    return found


def step(state: Any, x: Any = None) -> Any:
    y = jnp.sin(2 * state) + (0.2 if x is None else x * state)
    return state + 0.3 * jnp.cos(y), y


def stop(state: Any, y: Any) -> Any:
    """After 3 steps or so."""
    return state.sum() + 0.01 * y.sum() > 0.8


def silent(state: Any, *_: Any, **__: Any) -> Any:
    return state, None


# (what is wrong, the class of the error, words of its message in their order)
Mistake = tuple[Any, Any, list[str]]
NO_COUNT: list[Any] = [(0, ValueError), (-1, ValueError), (2.0, TypeError), (jnp.int32(3), TypeError)]
NO_INDEX: list[Any] = [1.0, slice(0, 1), None, True, jnp.ones(2, int)]
NO_ROW: list[Any] = ["abc", {"a": jax.random.key(0)}, print]
WRONG_ROWS: list[Any] = [
    (jnp.ones(2, jnp.float32), ["the row itself", "float32[2]", "expected float64[2]", "astype"]),
    (jnp.ones(3), ["got float64[3]", "expected float64[2]"]),
    ((jnp.ones(2),), ["another structure"]),
    ("abc", ["'abc'"]),
]
ITERATIONS: list[Any] = [
    lambda b: [row for row in b],  # noqa: C416, the statement
    lambda b: next(iter(b)),
    list,
    tuple,
]
INSTEAD = ["a Buffer cannot be iterated over", "fori_loop(0, buffer.count", "length=buffer.count)", "buffer.rows"]

BUFFERS: list[Mistake] = [
    *((lambda n=n: lx.Buffer(n, like=1.0), error, ["Buffer(capacity=...)"]) for n, error in NO_COUNT),
    *((lambda x=x: lx.Buffer(3, like=x), TypeError, ["Buffer(like=...)", "arrays of numbers"]) for x in NO_ROW),
    *((lambda i=i: buffer(1.0)[i], TypeError, ["one at a time", "`.rows`"]) for i in NO_INDEX),
    *(
        (lambda row=row: lx.Buffer(3, like=jnp.ones(2)).append(row), TypeError, ["Buffer.append", *says])
        for row, says in WRONG_ROWS
    ),
    *((lambda how=how: how(buffer(1.0)), TypeError, INSTEAD) for how in ITERATIONS),
    *((lambda how=how: jax.jit(how)(buffer(1.0)), TypeError, INSTEAD) for how in ITERATIONS),
    (lambda: lx.Buffer(2, like=3).append(0.5), TypeError, ["Buffer.append", "got float 0.5, expected int64[]"]),
    (lambda: buffer().append(1.0, when=jnp.ones(2, bool)), TypeError, ["Buffer.append(when=...)", "one bool"]),
    *((lambda i=i: buffer(1.0)[i], eqx.EquinoxRuntimeError, ["no such row (", "buffer.count"]) for i in (1, -2)),
    *(
        (lambda i=i: lx.fori_loop(0, 1, lambda _, c: (c[0], c[0][i]), (buffer(1.0), 0.0)), eqx.EquinoxRuntimeError, [])
        for i in (1, -2)
    ),
    *(
        (
            lambda i=i, jit=jit: jit(lambda b: b[i])(buffer()),
            IndexError,
            [f"buffer[{i}]", "3 rows at most, from -3 to 2"],
        )
        for i in (3, -4, np.int8(5), 2**40)
        for jit in (jax.jit, eagerly)
    ),
    *(
        (
            lambda body=body: lx.fori_loop(0, 3, lambda i, c: {"b": body(i, c["b"])}, {"b": buffer(capacity=9)}),
            TypeError,
            ["body_fun of fori_loop", "['b']", name, "when="],
        )
        for name, body in {
            "cond": lambda i, b: lax.cond(i > 1, lambda b: b.append(1.0), lambda b: b, b),
            "select_n": lambda i, b: jax.tree.map(lambda new, old: jnp.where(i > 1, new, old), b.append(1.0), b),
            "scan": lambda i, b: lax.scan(lambda b, x: (b.append(x), None), b, jnp.arange(2.0))[0],
        }.items()
    ),
]
HISTORIES: list[Mistake] = [
    *((lambda k=k: lx.History(k, like=1.0), error, ["History(k=...)"]) for k, error in NO_COUNT),
    *((lambda x=x: lx.History(2, like=x), TypeError, ["History(like=...)", "arrays of numbers"]) for x in NO_ROW),
    *((lambda i=i: lx.History(3, ROWS)[i], TypeError, ["one at a time", "`.rows`"]) for i in NO_INDEX),
    *((lambda row=row: lx.History(2, ROWS).push(row), TypeError, ["History.push", *says]) for row, says in WRONG_ROWS),
    (lambda: lx.History(2, like=3).push(0.5), TypeError, ["History.push", "got float 0.5, expected int64[]"]),
    (lambda: lx.History(2), TypeError, ["either `rows`", "or `like`"]),
    (lambda: lx.History(2, ROWS, like=ROWS[0]), TypeError, ["either `rows`", "or `like`"]),
    (lambda: lx.History(2, ROWS, fill=1.0), TypeError, ["`fill`", "Leave one of them out"]),
    *(
        (
            lambda fill=fill: lx.History(2, like={"i": 3, "x": jnp.ones(2)}, fill=fill),
            TypeError,
            ["History(fill=...)", "['i']", got, "expected int64[]"],
        )
        for fill, got in [(0.5, "0.5"), (jnp.ones(2, int), "int64[2]"), ("abc", "'abc'")]
    ),
    *(
        (lambda rows=rows: lx.History(2, rows), error, ["History", *says])
        for rows, error, says in [
            ({"a": jnp.ones(3), "b": jnp.ones(2)}, ValueError, ["as many rows", "['a']: 3 rows", "['b']: 2 rows"]),
            ({"a": "abc"}, TypeError, ["arrays of numbers", "['a']", "'abc'"]),
            (jax.random.split(jax.random.key(0), 3), TypeError, ["arrays of numbers", "key_data"]),
            ((), TypeError, ["expected arrays with at least 2 rows"]),
        ]
    ),
]


def rolled(*args: Any, **options: Any) -> Any:
    return lambda every: lx.rollout(*args, **options, save_every=every)


NO_CAPACITY = [
    "rollout has no static capacity for outputs",
    "inputs has no arrays",
    "max_steps=",
    "(state, None) from step",
]
ROLLOUTS: list[Mistake] = [
    (
        rolled(silent, STATE, inputs={"a": jnp.ones(3), "b": jnp.ones(2)}),
        ValueError,
        ["rollout", "every array of inputs", "['a']: 3 rows", "['b']: 2 rows"],
    ),
    *(
        (rolled(step, STATE, 4, history=h), TypeError, ["rollout(history=...)", "loopax.History"])
        for h in (ROWS, [1.0], lx.Buffer(3, like=1.0))
    ),
    (
        rolled(lambda state, history: (state, state), STATE, 4, history=lx.History(2, jnp.ones((2, 3)))),
        TypeError,
        ["the row does not match the others", "float64[2], expected float64[3]"],
    ),
    (
        rolled(step, STATE),
        ValueError,
        ["rollout does not know how many steps", "inputs has no arrays", "`length`", "`stop`"],
    ),
    (rolled(step, STATE, stop=stop), ValueError, NO_CAPACITY),
    (lambda every: jax.jit(lambda n: lx.rollout(step, STATE, n, save_every=every))(3), ValueError, NO_CAPACITY),
    *(
        (
            rolled(lambda _, result=result: result, STATE, 4),
            TypeError,
            ["step of rollout must return a pair (state, output)", got, "(state, None)"],
        )
        for result, got in [(1.0, "float"), ((1.0, 2.0, 3.0), "a tuple of 3"), ({}, "dict")]
    ),
    *(
        (rolled(step, STATE, 4, stop=lambda state, y, r=r: r), TypeError, ["stop of rollout must return one bool"])
        for r in (1.0, jnp.ones(2, bool), None, (True,))
    ),
    (rolled(step, STATE, 4, max_steps=3), ValueError, ["loopax.rollout: max_steps=3 stopped"]),
    (
        rolled(step, STATE, stop=stop, max_steps=2),
        eqx.EquinoxRuntimeError,
        ["loopax.rollout at ", "max_steps=2 stopped"],
    ),
]
OUTPUTS: list[Mistake] = [
    *(
        (lambda e=e: lx.rollout(step, STATE, 4, save_every=e), error, ["rollout(save_every=...)"])
        for e, error in [*NO_COUNT, (True, TypeError)]
    ),
    *(
        (
            lambda output=output: lx.rollout(lambda state: (state, output), STATE, 4, save_every=2),
            TypeError,
            ["rollout(save_every=...): the output of step", "arrays of numbers"],
        )
        for output in ("abc", jax.random.key(0), {"f": print})
    ),
]


def lanes(make: Any) -> Any:
    """A batch of as many lanes as there are rows."""
    return jax.vmap(make)(jnp.arange(3.0))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: lanes(lambda x: lx.Buffer(3, like=x).append(x)).rows, "Buffer.rows"),
        (lambda: lanes(lambda x: lx.Buffer(3, like=x).append(x))[0], "Buffer[index]"),
        (lambda: lanes(lambda x: lx.Buffer(3, like=x).append(x)).append(1.0), "Buffer.append"),
        (lambda: lanes(lambda x: lx.History(3, like=x).push(x)).mask, "History.mask"),
        (lambda: lanes(lambda x: lx.History(3, like=x).push(x)).push(1.0), "History.push"),
        (lambda: lanes(lambda x: lx.History(3, jnp.ones((3, 9999)) * x)).rows, "History.rows"),
        (lambda: lanes(lambda x: lx.History(3, jnp.ones((3, 9999)) * x))[-1], "History[index]"),
    ],
)
def test_a_batch_is_not_read_as_one(call: Any, name: str) -> None:
    with raises(ValueError, name, "a batch of lanes (3,)", "`jax.vmap("):
        call()


@pytest.mark.parametrize(("call", "error", "says"), [*BUFFERS, *HISTORIES, *OUTPUTS])
def test_mistakes(call: Any, error: Any, says: list[str]) -> None:
    with raises(error, *says):
        call()


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("call", "error", "says"), ROLLOUTS)
def test_mistakes_in_rollouts(call: Any, error: Any, says: list[str], every: int) -> None:
    with raises(error, *says):
        call(every)


def test_what_is_no_mistake() -> None:
    """A row that is not appended, lanes that do not append too many, and what messages say to do instead."""
    full = buffer(1.0, 2.0, capacity=2)
    assert_close(full.append(3.0, when=False).rows, jnp.array([1.0, 2.0]))
    f = lambda n: lx.fori_loop(0, n, lambda i, b: b.append(1.0), buffer(capacity=2), max_steps=4).count
    assert jax.vmap(f)(jnp.array([2, 0, 1])).tolist() == [2, 0, 1]
    with raises(eqx.EquinoxRuntimeError, "room for 2 rows"):
        jax.vmap(f)(jnp.array([2, 3, 1]))
    sums = lambda b: lx.scan(lambda c, x: (c + x, None), 0.0, b.rows, length=b.count)[0]
    assert jax.jit(sums)(buffer(1.0, 2.0)) == 3.0
    filled = lx.History(2, like={"i": 3, "x": jnp.ones(2)}, fill=1).rows
    assert_close(filled, {"i": jnp.ones(2, int), "x": jnp.ones((2, 2))})
    done, info = lx.rollout(step, STATE, stop=stop, max_steps=2, throw=False, info=True)
    assert (bool(info.limit_reached), int(done.num_steps)) == (True, 2)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64", "uint64"])
def test_traced_indices_of_every_dtype(dtype: str) -> None:
    """None of them wraps to a row that is there."""
    limits = jnp.iinfo(dtype)
    for rows in (buffer(3.0, 4.0, capacity=2), lx.History(2, jnp.array([3.0, 4.0]))):
        read = eqx.filter_jit(lambda i, rows=rows: rows[i])
        assert [float(read(jnp.asarray(i, dtype))) for i in (0, 1)] == [3.0, 4.0]
        wrapping = [limits.min, limits.max, 2**31, 2**32, 2**32 + 1, -(2**32), 2**63]
        for index in {number for number in wrapping if limits.min <= number <= limits.max} - {0}:
            with raises(eqx.EquinoxRuntimeError, "[index] at", "there "):
                read(jnp.asarray(index, dtype))


@pytest.mark.parametrize("index", [3, -4])
def test_rows_of_a_window_that_are_not_there(storage: str, index: int) -> None:
    window = lx.History(3, ROWS).push(ROWS[0])
    with raises(IndexError, f"history[{index}]", "3 rows at most, from -3 to 2"):
        window[index]
    with raises(eqx.EquinoxRuntimeError, "3 rows, from -3 to 2"):
        eqx.filter_jit(lambda i: window[i])(jnp.int32(index))
    with raises(eqx.EquinoxRuntimeError, "3 rows, from -3 to 2"):
        lx.fori_loop(index, index + 1, lambda i, c: (c[0], c[0][i]), (window, ROWS[0]))
    for row, says in WRONG_ROWS[:2]:
        with raises(TypeError, "History.push", *says):
            window.push(row)


def test_inputs_shorter_than_a_traced_length() -> None:
    f = eqx.filter_jit(lambda n, every: lx.rollout(step, STATE, n, inputs=INPUTS, save_every=every).num_steps)
    for every in (1, 2):
        with raises(eqx.EquinoxRuntimeError, "loopax.rollout at ", "): `length`", "inputs has 7 rows"):
            f(jnp.int32(8), every)
        with raises(eqx.EquinoxRuntimeError, "loopax.rollout at ", "): `length` ("):
            f(jnp.int32(-1), every)
