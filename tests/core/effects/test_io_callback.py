"""`io_callback` with a result, such as a simulator's step: only a lane's own steps call it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import loopax as lx
from tests.core.effects.log import EFFECTS, Log

X, N = np.array([1.0, 10.0, 100.0]), np.array([2, 0, 3])
CALLED = [1.0, 2.0, 100.0, 200.0, 400.0]
DOUBLED = [4.0, 10.0, 800.0]


def doubled(log, x, **options):
    """2 x, found outside of the program."""
    return 2.0 * io_callback(log.append_and_return, jax.ShapeDtypeStruct((), float), x, **options)


def fori(step, x, n, **options):
    return lx.fori_loop(0, n, lambda i, x: step(x), x, max_steps=4, **options)


def while_(step, x, n, **options):
    return lx.while_loop(lambda c: c[1] < n, lambda c: (step(c[0]), c[1] + 1), (x, 0), max_steps=4, **options)[0]


def scan(step, x, n, **options):
    return lx.scan(lambda x, _: (step(x), None), x, length=n, max_steps=4, **options)[0]


def rollout(step, x, n, **options):
    return lx.rollout(lambda x: (step(x), x), x, n, max_steps=4, **options)[0]


@pytest.mark.parametrize("lanes", ["lockstep", "compact", "sequential", "auto"])
@pytest.mark.parametrize("loop", [fori, while_, scan, rollout])
def test_in_each_loop(loop, lanes):
    log = Log()
    f = jax.jit(jax.vmap(lambda x, n: loop(lambda x: doubled(log, x), x, n, lanes=lanes)))
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


INNER = {
    "jit": lambda step, x: jax.jit(step)(x),
    "scan": lambda step, x: lax.scan(lambda x, _: (step(x), None), x, None, length=1)[0],
    "while": lambda step, x: lax.while_loop(lambda c: c[1] < 1, lambda c: (step(c[0]), c[1] + 1), (x, 0))[0],
    "loop": lambda step, x: lx.fori_loop(0, jnp.int32(x > 0), lambda i, x: step(x), x),
    "checkpoint": lambda step, x: jax.checkpoint(step)(x),
}


@pytest.mark.parametrize("inner", INNER)
def test_inside_other_constructs(inner):
    log = Log()
    f = jax.jit(jax.vmap(lambda x, n: fori(lambda x: INNER[inner](lambda x: doubled(log, x), x), x, n)))
    assert log.of(f, X, N) == CALLED
    assert f(X, N).tolist() == DOUBLED


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


def test_through_a_queue():
    log = Log()
    item = lambda item: fori(lambda x: doubled(log, x), *item)
    f = jax.jit(lambda *items: lx.lanes_map(item, items, lanes=2))
    assert log.of(f, X, N) == CALLED
    assert f(X, N).tolist() == DOUBLED
    found = {}
    assert log.of(lambda: found.update(lx.lanes_stream(item, zip(X, N, strict=True), lanes=2))) == CALLED
    assert found == dict(enumerate(DOUBLED))


def test_one_loop_after_another_in_each_lane():
    """Lanes that run free of each other."""
    log = Log()
    inner = lambda x, n: lx.fori_loop(0, n, lambda i, x: doubled(log, x), x)
    f = jax.jit(jax.vmap(lambda x, n: lx.fori_loop(0, 2, lambda i, x: inner(x, n), x, lanes="free")))
    assert log.of(f, X, np.array([1, 0, 2])) == [1.0, 2.0, 100.0, 200.0, 400.0, 800.0]


def test_several_results():
    log = Log()
    types = (jax.ShapeDtypeStruct((), float), jax.ShapeDtypeStruct((2,), float))

    def call(x):
        log.append(x)
        return np.asarray(x), np.array([1.0, 2.0])

    step = lambda x: sum(map(jnp.sum, io_callback(call, types, x)))
    f = jax.jit(jax.vmap(lambda x, n: fori(step, x, n)))
    assert log.of(f, X, N) == [1.0, 4.0, 100.0, 103.0, 106.0]
    assert f(X, N).tolist() == [7.0, 10.0, 109.0]


def test_no_loop_goes_on_for_a_finished_lane():
    """Not for what a call that did not happen would have returned."""
    log = Log()

    def step(x):
        last = doubled(log, x) * 0.0 + 3.0
        return lx.while_loop(lambda i: i != last, lambda i: i + 1.0, 1.0) + x - 1.0

    f = jax.jit(jax.vmap(lambda x, n: fori(step, x, n)))
    assert f(X, N).tolist() == [5.0, 10.0, 106.0]
    assert log.of(f, X, N) == [1.0, 3.0, 100.0, 102.0, 104.0]


def test_many_lanes():
    """They are not written out one by one."""
    log = Log()
    f = jax.vmap(lambda x, n: fori(lambda x: doubled(log, x), x, n))
    sizes = [len(str(jax.make_jaxpr(f)(jnp.ones(n), jnp.ones(n, int)))) for n in (10, 99)]
    assert sizes[1] < 1.1 * sizes[0]


def test_with_an_order():
    """One lane after another; JAX has no order between the lanes of a batch."""
    log = Log()

    def lanes(how: Any) -> Any:
        return jax.vmap(lambda x, n: fori(lambda x: doubled(log, x, ordered=True), x, n, lanes=how))

    assert log.in_order(jax.jit(lanes("sequential")), X, N) == CALLED
    for how in ("lockstep", "compact"):
        with pytest.raises(NotImplementedError, match=r"ordered `io_callback` with results.*JAX has no order between"):
            lanes(how)(X, N)
