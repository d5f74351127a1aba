"""Histories: a window on a series is what the end of a Python list of it is, in every transformation."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src import history as module
from tests.support.complex_steps import gradient, value_and_gradient
from tests.support.program_text import copies_of
from tests.support.reference import assert_close

BOUND = 12
START = np.array([[0.3, 0.7], [0.1, 0.2], [-0.5, 0.4]])
WEIGHTS = np.arange(1.0, 7.0).reshape(3, 2)


@pytest.fixture(params=["shifted", "ring"])
def storage(request: Any, monkeypatch: Any) -> str:
    """Small windows are shifted; with no limit on what is small, they are rings."""
    if request.param == "ring":
        monkeypatch.setattr(module, "RING_BYTES", 0)
    return request.param


slow = pytest.mark.slow


def choose(*cases: Any) -> Any:
    """Storage, kind and what else there is: a shifted window is an array in the carry as any other is."""
    names = lambda case: "-".join(map(str, case))
    return [pytest.param(*case, id=names(case)) for case in cases]


def slowly(*cases: Any) -> Any:
    return [pytest.param(*case.values, id=case.id, marks=slow) for case in choose(*cases)]


def next_row(window: Any, i: Any, xp: Any = np) -> Any:
    """What depends on the oldest row, the newest and one between, and on the step."""
    return xp.sin(window[0]) + 0.5 * window[-1] * window[1] + 0.1 * i


def loss(steps: Any, start: Any, **options: Any) -> Any:
    def body(i: Any, window: Any) -> Any:
        return window.push(next_row(window, i.astype(float), jnp))

    options = {"max_steps": BOUND, **options}
    window = lx.fori_loop(jnp.int32(0), steps, body, lx.History(3, start), **options)
    return (window.rows**2 * WEIGHTS).sum() + window[-2].sum()


def loss_of_lists(steps: int, start: Any) -> Any:
    series = list(start)
    for i in range(steps):
        series.append(next_row(series[-3:], float(i)))
    return (np.stack(series[-3:]) ** 2 * WEIGHTS).sum() + series[-2].sum()


def test_rings_begin_where_a_window_is_large(storage: str) -> None:
    assert (lx.History(3, START)._oldest is not None) == (storage == "ring")
    assert lx.History(4096, like=0.0)._oldest is not None
    assert lx.History(4095, like=0.0)._oldest is None or storage == "ring"


KINDS = ["checkpointed", lx.Checkpointed(3), "bounded", "residuals", "auto"]
RINGS = choose(*[("ring", kind) for kind in KINDS])


@pytest.mark.parametrize(
    ("storage", "kind"),
    [*RINGS, *choose(("shifted", "checkpointed")), *slowly(*[("shifted", kind) for kind in (KINDS[1], KINDS[3])])],
    indirect=["storage"],
)
def test_values_and_gradients(storage: str, kind: Any) -> None:
    found = jax.jit(jax.value_and_grad(lambda start: loss(7, start, kind=kind)))(START)
    assert_close(found, value_and_gradient(ft.partial(loss_of_lists, 7), START))


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
            series.append(series[-1] - np.sqrt(series[-2]))
        return series[-1] + series[-2]

    steps, xs = np.array([1, 4, 0]), np.array([2.0, 20.0, 0.5])
    wanted = np.stack([gradient(ft.partial(of_list, n), x) for n, x in zip(steps, xs, strict=True)])
    assert_close(jax.jit(jax.vmap(jax.grad(of_lane, 1)))(steps, xs), wanted)


def test_rows_that_are_pytrees(storage: str) -> None:
    """Integers have no derivative, and stay integers."""

    def f(x: Any) -> Any:
        start = {"x": x * np.arange(1.0, 4.0), "i": np.arange(3)}
        body = lambda i, w: w.push({"x": jnp.sin(w[0]["x"]) + w[-1]["i"].astype(float), "i": w[1]["i"] + i})
        window = lx.fori_loop(0, 5, body, lx.History(2, start))
        return (window.rows["x"] ** 2).sum(), window.rows["i"]

    numbers = [0, 1]
    for i in range(5):
        numbers.append(numbers[-1] + i)

    def of_lists(x: Any) -> Any:
        xs = [x, 2 * x]
        for i in range(5):
            xs.append(np.sin(xs[-2]) + float(numbers[i + 1]))
        return xs[-1] ** 2 + xs[-2] ** 2

    value, slope = value_and_gradient(of_lists, 0.3)
    assert_close(jax.jit(jax.value_and_grad(f, has_aux=True))(0.3), ((value, np.array(numbers[-2:])), slope))


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


def masked_mean(xs: Any, length: Any, size: int) -> Any:
    """The mean of the last rows after each step: of as many as there are."""

    def step(window: Any, x: Any) -> Any:
        window = window.push(x)
        rows = jnp.log(jnp.where(window.mask, window.rows, 1.0))
        return window, rows.sum() / window.count.astype(float)

    return lx.scan(step, lx.History(size, like=xs[0]), xs, length=length)[1]


@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_window_that_fills_up_from_nothing(storage: str, size: int) -> None:
    """Values and gradients of each lane are those of the Python list, for fewer rows than the window and for more."""
    xs, lengths = jnp.exp(jnp.sin(jnp.arange(15.0).reshape(3, 5))), jnp.array([5, 0, 2])
    means = jax.vmap(ft.partial(masked_mean, size=size))(xs, lengths)
    for row, length, mean in zip(xs, lengths, means, strict=True):
        logs = np.log(row[: int(length)])
        expected = [logs[max(0, i + 1 - size) : i + 1].mean() for i in range(len(logs))]
        assert_close(mean, np.array(expected + [0.0] * (5 - len(logs))))
    slopes = jax.grad(lambda xs: jax.vmap(ft.partial(masked_mean, size=size))(xs, lengths).sum())(xs)
    by_hand = np.zeros((3, 5))
    for lane, length in enumerate(lengths.tolist()):
        for i in range(length):
            part = slice(max(0, i + 1 - size), i + 1)
            by_hand[lane, part] += 1 / (part.stop - part.start) / xs[lane, part]
    assert_close(slopes, by_hand)


def test_what_a_window_counts(storage: str) -> None:
    """Rows that were pushed, at most all. A history with first rows, or filled with a number, is full."""
    window = lx.History(3, like={"x": jnp.ones(2), "i": 1})
    for pushed in range(5):
        assert (window.count.dtype, int(window.count)) == (jnp.int32, min(pushed, 3))
        assert window.mask.tolist() == [i >= 3 - pushed for i in range(3)]
        window = window.push({"x": jnp.full(2, pushed), "i": pushed})
    for full in (lx.History(3, like=0.0, fill=1.0), lx.History(3, jnp.arange(4.0))):
        assert int(full.count) == int(full.push(2.0).count) == 3
        assert full.mask.all()
        assert len(jax.tree.leaves(full)) == (2 if storage == "ring" else 1), "counts nothing"
