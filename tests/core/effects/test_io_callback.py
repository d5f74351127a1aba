"""`io_callback` with a result, such as a simulator's step: only a lane's own steps call it."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

import loopax as lx
from tests.core.effects.log import EFFECTS, FORMS, Log

X, N = np.array([1.0, 10.0, 100.0]), np.array([2, 0, 3])
CALLED = [1.0, 2.0, 100.0, 200.0, 400.0]
DOUBLED = [4.0, 10.0, 800.0]


def doubled(log, x, **options):
    """2 x, found outside of the program."""
    return 2.0 * io_callback(log.append_and_return, jax.ShapeDtypeStruct((), float), x, **options)


fori = FORMS["fori_loop"]


@pytest.mark.parametrize("lanes", ["lockstep", "compact", "sequential", "auto"])
@pytest.mark.parametrize("loop", FORMS)
def test_in_each_loop(loop, lanes):
    log = Log()
    f = jax.jit(jax.vmap(lambda x, n: FORMS[loop](lambda x: doubled(log, x), x, n, lanes=lanes)))
    assert log.of(f, X, N) == CALLED
    assert f(X, N).tolist() == DOUBLED


def test_in_branches():
    """Of lanes that take them."""
    log = Log()
    call, keep = lambda x: doubled(log, x), lambda x: x
    for options in ({}, {"lanes": "compact"}):
        f = jax.jit(jax.vmap(lambda x, n, options=options: lx.cond(n > 1, call, keep, x, **options)))
        assert log.of(f, X, N) == [1.0, 100.0]
        assert f(X, N).tolist() == [2.0, 10.0, 200.0]
    f = jax.jit(jax.vmap(lambda x, n: lx.switch(n, [keep, keep, keep, call], x)))
    assert log.of(f, X, N) == [100.0]
    in_loop = jax.jit(jax.vmap(lambda x, n: fori(lambda x: lx.cond(x > 1.5, call, lambda x: 2.0 * x, x), x, n)))
    assert log.of(in_loop, X, N) == CALLED[1:]


def test_other_batches():
    """Two `vmap`s, limits that leave rows without an active lane, no active lane, no lane, no batched operand."""
    log = Log()
    lane = lambda x, low, n: lx.fori_loop(low, low + n, lambda i, x: doubled(log, x), x)
    zero, rows = np.zeros(3, int), np.array([0, 3, 7])
    both, counts = jax.jit(jax.vmap(jax.vmap(lane), (None, 0, 0))), np.stack([N, N[::-1]])
    assert log.of(both, X, np.stack([rows, zero]), counts) == sorted([*CALLED, 1.0, 2.0, 4.0, 100.0, 200.0])
    assert both(X, np.stack([rows, zero]), counts).tolist() == [DOUBLED, [8.0, 10.0, 400.0]]
    f = jax.jit(jax.vmap(lane))
    assert log.of(f, X, zero, zero) == []
    assert f(X, zero, zero).tolist() == X.tolist()
    assert f(X[:0], zero[:0], N[:0]).shape == (0,)
    shared = jax.jit(jax.vmap(lambda x: x + lane(1.0, 0, 2)))
    assert log.of(shared, X) == [1.0, 2.0]


@pytest.mark.parametrize("lanes", ["lockstep", "compact", "sequential"])
@pytest.mark.parametrize("effect", ["callback", "io_callback", "io_callback with a result"])
def test_rows_in_which_no_lane_is_active(effect, lanes):
    """They are passed over; of two batches, each has its own."""
    log = Log()

    def step(x):
        result = EFFECTS[effect](log, x)
        return 2.0 * (x if result is None else result)

    own_window = lambda x, low, n: lx.fori_loop(low, low + n, lambda i, x: step(x), x, lanes=lanes)
    row = lambda x, _: (step(x), x)
    reverse = lambda x, low, n: lx.scan(row, x, np.arange(4.0), n, True, stop=lambda x, _: x > 7.0, lanes=lanes)
    x, n = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[1, 2], [3, 0]])
    low = np.array([[0, 9], [7, 0]])
    called = [1.0, 2.0, 3.0, 4.0, 6.0]
    f = jax.jit(jax.vmap(jax.vmap(own_window)))
    assert log.of(f, x, low, n) == [*called, 12.0]
    assert f(x, low, n).tolist() == [[2.0, 8.0], [24.0, 5.0]]
    f = jax.jit(jax.vmap(jax.vmap(reverse)))
    assert log.of(f, x, low, n) == called
    last, ys = f(x, low, n)
    assert last.tolist() == [[2.0, 8.0], [12.0, 5.0]]
    assert ys.tolist() == [[[1.0, 0.0, 0.0, 0.0], [4.0, 2.0, 0.0, 0.0]], [[0.0, 6.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]


def test_no_loop_goes_on_for_a_finished_lane():
    """Not for what a call that did not happen would have returned."""
    log = Log()

    def step(x):
        last = doubled(log, x) * 0.0 + 3.0
        return lx.while_loop(lambda i: i != last, lambda i: i + 1.0, 1.0) + x - 1.0

    f = jax.jit(jax.vmap(lambda x, n: fori(step, x, n)))
    assert f(X, N).tolist() == [5.0, 10.0, 106.0]
    assert log.of(f, X, N) == [1.0, 3.0, 100.0, 102.0, 104.0]


def test_with_an_order():
    """One lane after another; JAX has no order between the lanes of a batch."""
    log = Log()

    def lanes(how: Any) -> Any:
        return jax.vmap(lambda x, n: fori(lambda x: doubled(log, x, ordered=True), x, n, lanes=how))

    assert log.in_order(jax.jit(lanes("sequential")), X, N) == CALLED
    for how in ("lockstep", "compact"):
        with pytest.raises(NotImplementedError, match=r"ordered `io_callback` with results.*JAX has no order between"):
            lanes(how)(X, N)
