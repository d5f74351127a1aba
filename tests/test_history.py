"""Histories: a window on a series is what the end of a Python list of it is, in every transformation."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src import history as module
from tests.support.limited_loops import raises
from tests.support.reference import assert_close
from tests.test_buffers import copies_of

BOUND = 12
REVERSE_KINDS = ["checkpointed", lx.Checkpointed(3), "bounded", "residuals", "auto"]
START = jnp.array([[0.3, 0.7], [0.1, 0.2], [-0.5, 0.4]])
STEPS = jnp.array([7, 0, 12, 3], jnp.int32)
STARTS = jnp.stack([START, 2 * START, START - 0.1, -START])


@pytest.fixture(params=["shifted", "ring"])
def storage(request: Any, monkeypatch: Any) -> str:
    """Small windows are shifted; with no limit on what is small, they are rings."""
    if request.param == "ring":
        monkeypatch.setattr(module, "RING_BYTES", 0)
    return request.param


def next_row(window: Any, i: Any) -> Any:
    """What depends on the oldest row, the newest and one between, and on the step."""
    return jnp.sin(window[0]) + 0.5 * window[-1] * window[1] + 0.1 * i


def loss(steps: Any, start: Any, **options: Any) -> Any:
    def body(i: Any, window: Any) -> Any:
        return window.push(next_row(window, i.astype(float)))

    window = lx.fori_loop(jnp.int32(0), steps, body, lx.History(3, start), **{"max_steps": BOUND, **options})
    return (window.rows**2 * jnp.arange(1.0, 7.0).reshape(3, 2)).sum() + window[-2].sum()


def loss_of_lists(steps: int, start: Any) -> Any:
    series = list(start)
    for i in range(steps):
        series.append(next_row(series[-3:], float(i)))
    return (jnp.stack(series[-3:]) ** 2 * jnp.arange(1.0, 7.0).reshape(3, 2)).sum() + series[-2].sum()


def lanes_of_lists(function: Any) -> Any:
    """Lane by lane."""
    return jnp.stack([function(int(n), x) for n, x in zip(STEPS, STARTS, strict=True)])


def test_rings_begin_where_a_window_is_large(storage: str) -> None:
    assert (lx.History(3, START)._oldest is not None) == (storage == "ring")
    assert lx.History(4096, like=0.0)._oldest is not None
    assert lx.History(4095, like=0.0)._oldest is None or storage == "ring"


@pytest.mark.parametrize("kind", REVERSE_KINDS)
def test_values_and_derivatives(storage: str, kind: Any) -> None:
    of_history = lambda start: loss(7, start, kind=kind)
    of_lists = lambda start: loss_of_lists(7, start)
    assert_close(jax.jit(jax.value_and_grad(of_history))(START), jax.value_and_grad(of_lists)(START))
    hessian = jax.jit(jax.hessian(of_lists))(START)
    for second in (jax.jacfwd(jax.jacrev(of_history)), jax.jacrev(jax.jacrev(of_history))):
        assert_close(jax.jit(second)(START), hessian)


def test_forward_mode(storage: str) -> None:
    tangent = (jnp.cos(START),)
    of_lists = jax.jvp(lambda start: loss_of_lists(7, start), (START,), tangent)
    assert_close(jax.jvp(lambda start: loss(7, start), (START,), tangent), of_lists)
    twice = jax.jacrev(jax.jacfwd(lambda start: loss(7, start)))
    assert_close(jax.jit(twice)(START), jax.jit(jax.hessian(lambda start: loss_of_lists(7, start)))(START))


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
@pytest.mark.parametrize("kind", ["checkpointed", lx.Checkpointed(3), "residuals"])
def test_lanes_with_counts_of_their_own(storage: str, kind: Any, lanes: Any) -> None:
    """Some of which finish before others, or take no step at all."""
    of_lane = lambda n, x: loss(n, x, kind=kind, lanes=lanes)
    assert_close(jax.vmap(of_lane)(STEPS, STARTS), lanes_of_lists(loss_of_lists))
    wanted = lanes_of_lists(jax.grad(loss_of_lists, 1))
    assert_close(jax.vmap(jax.grad(of_lane, 1))(STEPS, STARTS), wanted)
    assert_close(jax.grad(lambda xs: jax.vmap(of_lane)(STEPS, xs).sum())(STARTS), wanted)


def test_hessian_of_lanes(storage: str) -> None:
    wanted = lanes_of_lists(lambda n, x: jax.jit(jax.hessian(lambda x: loss_of_lists(n, x)))(x))
    assert_close(jax.jit(jax.vmap(jax.hessian(loss, 1)))(STEPS, STARTS), wanted)


def test_lanes_with_one_count(storage: str) -> None:
    wanted = jnp.stack([jax.grad(loss_of_lists, 1)(7, x) for x in STARTS])
    assert_close(jax.vmap(jax.grad(loss, 1), in_axes=(None, 0))(jnp.int32(7), STARTS), wanted)


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_finished_lanes_evaluate_nothing_outside_of_the_domain(storage: str, lanes: Any) -> None:
    """The rows would fall below zero if a lane went on."""

    def of_lane(steps: Any, x: Any) -> Any:
        body = lambda _, window: window.push(window[-1] - jnp.sqrt(window[0]))
        start = lx.History(2, jnp.stack([x + 1.0, x]))
        return lx.fori_loop(0, steps, body, start, max_steps=4, lanes=lanes).rows.sum()

    def of_list(steps: int, x: Any) -> Any:
        series = [x + 1.0, x]
        for _ in range(steps):
            series.append(series[-1] - jnp.sqrt(series[-2]))
        return series[-1] + series[-2]

    steps, xs = jnp.array([1, 4, 0]), jnp.array([2.0, 20.0, 0.5])
    wanted = jnp.stack([jax.grad(of_list, 1)(int(n), x) for n, x in zip(steps, xs, strict=True)])
    assert_close(jax.vmap(jax.grad(of_lane, 1))(steps, xs), wanted)


def nested(steps: Any, start: Any, **options: Any) -> Any:
    """Both loops push to the same window."""
    inner = lambda j, window: window.push(next_row(window, j.astype(float)))

    def outer(i: Any, window: Any) -> Any:
        window = lx.fori_loop(0, i, inner, window, max_steps=4, **options)
        return window.push(window[0] * window[-1])

    return (lx.fori_loop(0, steps, outer, lx.History(3, start), max_steps=4, **options).rows ** 2).sum()


def nested_of_lists(steps: int, start: Any) -> Any:
    series = list(start)
    for i in range(steps):
        for j in range(i):
            series.append(next_row(series[-3:], float(j)))
        series.append(series[-3] * series[-1])
    return sum((row**2).sum() for row in series[-3:])


@pytest.mark.parametrize("kind", ["checkpointed", lx.Checkpointed(2), "residuals"])
def test_nested_loops(storage: str, kind: Any) -> None:
    of_lane = jax.value_and_grad(lambda n, x: nested(n, x, kind=kind), 1)
    assert_close(jax.jit(of_lane)(4, START), jax.value_and_grad(nested_of_lists, 1)(4, START))
    steps = jnp.array([4, 1, 3, 0])
    wanted = [jax.value_and_grad(nested_of_lists, 1)(int(n), x) for n, x in zip(steps, STARTS, strict=True)]
    values, gradients = jax.jit(jax.vmap(of_lane))(steps, STARTS)
    assert_close((values, gradients), tuple(jnp.stack(parts) for parts in zip(*wanted, strict=True)))


def test_rows_that_are_pytrees(storage: str) -> None:
    """Integers have no derivative, and stay integers."""

    def f(x: Any) -> Any:
        start = {"x": x * jnp.arange(1.0, 4.0), "i": jnp.arange(3)}
        body = lambda i, w: w.push({"x": jnp.sin(w[0]["x"]) + w[-1]["i"].astype(float), "i": w[1]["i"] + i})
        window = lx.fori_loop(0, 5, body, lx.History(2, start))
        return (window.rows["x"] ** 2).sum(), window.rows["i"]

    def of_lists(x: Any) -> Any:
        xs, numbers = [x, 2 * x], [0, 1]
        for i in range(5):
            xs.append(jnp.sin(xs[-2]) + float(numbers[-1]))
            numbers.append(numbers[-1] + i)
        return xs[-1] ** 2 + xs[-2] ** 2, jnp.array(numbers[-2:])

    assert_close(jax.value_and_grad(f, has_aux=True)(0.3), jax.value_and_grad(of_lists, has_aux=True)(0.3))


def test_one_row(storage: str) -> None:
    def f(x: Any) -> Any:
        body = lambda _, window: window.push(jnp.sin(window[-1]) + window[0])
        return lx.fori_loop(0, 3, body, lx.History(1, x[None])).rows[0]

    def of_numbers(x: Any) -> Any:
        for _ in range(3):
            x = jnp.sin(x) + x
        return x

    assert_close(jax.value_and_grad(f)(jnp.array(0.3)), jax.value_and_grad(of_numbers)(jnp.array(0.3)))


def by_cond(even: Any, window: Any, row: Any) -> Any:
    return lax.cond(even, lambda: window.push(row), lambda: window)


def by_where(even: Any, window: Any, row: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(even, new, old), window.push(row), window)


@pytest.mark.parametrize("choose", [by_cond, by_where])
def test_other_ways_through_a_body(storage: str, choose: Any) -> None:
    def f(steps: Any, start: Any) -> Any:
        body = lambda i, window: choose(i % 2 == 0, window, jnp.sin(window[0]) * window[-1])
        return (lx.fori_loop(0, steps, body, lx.History(3, start), max_steps=6).rows ** 2).sum()

    def of_lists(steps: int, start: Any) -> Any:
        series = list(start)
        for _ in range(0, steps, 2):
            series.append(jnp.sin(series[-3]) * series[-1])
        return sum((row**2).sum() for row in series[-3:])

    assert_close(jax.jit(jax.value_and_grad(f, 1))(5, START), jax.value_and_grad(of_lists, 1)(5, START))
    steps = jnp.array([5, 0, 6, 2])
    wanted = [jax.grad(of_lists, 1)(int(n), x) for n, x in zip(steps, STARTS, strict=True)]
    assert_close(jax.jit(jax.vmap(jax.grad(f, 1)))(steps, STARTS), jnp.stack(wanted))


def test_windows_outside_of_loops(storage: str) -> None:
    """It is a sequence of which the first rows go: also when it is turned around more than once."""
    window, series = lx.History(3, jnp.arange(5.0)), [0.0, 1.0, 2.0]
    for row in (3.0, 4.0, 5.0, 6.0):
        assert window.rows.tolist() == [float(row) for row in window] == series[-3:]
        assert [float(window[jnp.int32(i)]) for i in range(-3, 3)] == 2 * series[-3:]
        window = window.push(row)
        series.append(row)
    assert len(window) == 3
    newest: Any = np.int64(-1)
    assert float(window[newest]) == 6.0


def test_traced_indices(storage: str) -> None:
    """Also where lanes read different rows of one window, and in gradients."""
    window = lx.History(3, START).push(2 * START[0])
    indices = jnp.array([-3, 2, 0, -1])
    assert_close(jax.vmap(lambda i: window[i])(indices), window.rows[indices])

    def f(rows: Any) -> Any:
        window = lx.History(3, rows).push(rows[0] * rows[1])
        return jax.vmap(lambda i: jnp.sin(window[i]).sum())(indices) @ jnp.arange(4.0)

    def of_arrays(rows: Any) -> Any:
        rows = jnp.stack([rows[1], rows[2], rows[0] * rows[1]])
        return jnp.sin(rows[indices]).sum(1) @ jnp.arange(4.0)

    assert_close(jax.value_and_grad(f)(START), jax.value_and_grad(of_arrays)(START))


def test_without_rows(storage: str) -> None:
    like = {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "i": 3}
    assert_close(lx.History(2, like=like).rows, {"x": jnp.zeros((2, 2), jnp.float32), "i": jnp.zeros(2, int)})
    assert_close(lx.History(2, like=1.0, fill=0.5).push(2).rows, jnp.array([0.5, 2.0]))


IN_PLACE = {
    "the oldest row is read": lambda window, x: window[0] * x,
    "both ends are read": lambda window, x: window[0] + jnp.sin(window[-1]) * x,
}


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("pushed", IN_PLACE)
def test_a_ring_is_written_in_place(pushed: str, lanes: bool) -> None:
    """A step of a loop, and of its gradient, copies no window that is large, where none is stored.

    Where windows are stored (`Checkpointed`, `Bounded`), a step that stores one costs the window, and XLA on a CPU
    copies it once more before it is changed. XLA also copies where a row is pushed that is not made of all rows that
    the step has read, since then it may write before it reads.
    """
    row, shape, x = IN_PLACE[pushed], "f64[8192]", 1.0
    if lanes:
        shape, x = "f64[2,8192]", jnp.ones(2)

    def f(x: Any) -> Any:
        window = lx.History(8192, like=x, fill=1.0)
        return lx.fori_loop(0, 64, lambda i, w: w.push(row(w, x)), window, kind="residuals").rows.sum()

    for function in (f, jax.grad(f)):
        assert copies_of(shape, jax.vmap(function) if lanes else function, x) == []


# ---- errors


@pytest.mark.parametrize(
    ("k", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (jnp.int32(3), TypeError)]
)
def test_k_is_a_positive_int(k: Any, error: Any) -> None:
    with raises(error, "History(k=...)"):
        lx.History(k, like=1.0)


def test_either_rows_or_like() -> None:
    for given in ({}, {"rows": START, "like": START[0]}):
        with raises(TypeError, "either `rows`", "or `like`"):
            lx.History(2, **given)
    with raises(TypeError, "`fill`", "Leave one of them out"):
        lx.History(2, START, fill=1.0)


@pytest.mark.parametrize(("fill", "got"), [(0.5, "0.5"), (jnp.ones(2, int), "int64[2]"), ("abc", "'abc'")])
def test_fill_is_a_number_of_their_type(fill: Any, got: str) -> None:
    with raises(TypeError, "History(fill=...)", "['i']", got, "expected int64[]"):
        lx.History(2, like={"i": 3, "x": jnp.ones(2)}, fill=fill)
    filled = lx.History(2, like={"i": 3, "x": jnp.ones(2)}, fill=1).rows
    assert_close(filled, {"i": jnp.ones(2, int), "x": jnp.ones((2, 2))})


def test_a_window_longer_than_the_data() -> None:
    with raises(ValueError, "History(4, rows)", "rows has 3 rows"):
        lx.History(4, START)


class Pair(eqx.Module):
    array: Any
    size: int


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        ({"a": jnp.ones(3), "b": jnp.ones(2)}, ValueError, ["as many rows", "['a']: 3 rows", "['b']: 2 rows"]),
        ({"a": jnp.ones(3), "b": jnp.float64(1.0)}, ValueError, ["leading axis", "['b']: float64[]"]),
        (Pair(jnp.ones(3), 3), ValueError, ["leading axis", ".size"]),
        ({"a": "abc"}, TypeError, ["arrays of numbers", "['a']", "'abc'"]),
        (jax.random.split(jax.random.key(0), 3), TypeError, ["arrays of numbers", "key_data"]),
        ((), TypeError, ["expected arrays with at least 2 rows"]),
    ],
)
def test_rows_are_arrays_of_as_many_rows(rows: Any, error: Any, says: list[str]) -> None:
    with raises(error, "History", *says):
        lx.History(2, rows)


@pytest.mark.parametrize("like", ["abc", {"a": jax.random.key(0)}, print])
def test_a_row_is_made_of_arrays(like: Any) -> None:
    with raises(TypeError, "History(like=...)", "arrays of numbers"):
        lx.History(2, like=like)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (jnp.ones(2, jnp.float32), ["the row itself", "float32[2]", "expected float64[2]", "astype"]),
        (jnp.ones(3), ["got float64[3]", "expected float64[2]"]),
        ((jnp.ones(2),), ["another structure"]),
        ("abc", ["'abc'"]),
    ],
)
def test_rows_that_do_not_match(storage: str, row: Any, says: list[str]) -> None:
    with raises(TypeError, "History.push", *says):
        lx.History(2, START).push(row)


def test_a_float_is_no_integer() -> None:
    with raises(TypeError, "History.push", "got float 0.5, expected int64[]"):
        lx.History(2, like=3).push(0.5)


@pytest.mark.parametrize("index", [3, -4])
def test_rows_that_are_not_there(storage: str, index: int) -> None:
    window = lx.History(3, START).push(START[0])
    with raises(IndexError, f"history[{index}]", "3 rows at most, from -3 to 2"):
        window[index]
    with raises(eqx.EquinoxRuntimeError, "3 rows, from -3 to 2"):
        eqx.filter_jit(lambda i: window[i])(jnp.int32(index))
    with raises(eqx.EquinoxRuntimeError, "3 rows, from -3 to 2"):
        lx.fori_loop(index, index + 1, lambda i, c: (c[0], c[0][i]), (window, START[0]))


@pytest.mark.parametrize("index", [1.0, slice(0, 1), None, True, jnp.ones(2, int)])
def test_one_row_at_a_time(index: Any) -> None:
    with raises(TypeError, "one at a time", "`.rows`"):
        lx.History(3, START)[index]
