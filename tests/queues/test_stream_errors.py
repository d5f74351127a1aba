"""`lanes_stream`: what users do wrong, and what goes wrong while a stream runs."""

import itertools as it
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.queues.streams import ANSWERS, collatz, expected, found, items


def test_resume_with_other_lanes_or_another_function_is_refused():
    long = lambda n: lx.fori_loop(0, 10**6, lambda i, x: x + n, jnp.int32(0))
    stream = lx.lanes_stream(long, items(4), num_lanes=2, chunk_steps=1)
    while not stream._working._in_lanes:
        stream._look()
    state = stream.suspend()
    with pytest.raises(ValueError, match=r"the suspended stream has 2 lanes, and num_lanes=4\. Give num_lanes=2"):
        lx.lanes_stream(long, [], num_lanes=4, resume=state)
    with pytest.raises(ValueError, match="those of another function"):
        lx.lanes_stream(collatz, [], num_lanes=2, resume=state)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, GeneratorExit])
def test_an_error_of_the_source_comes_after_the_results(prefetch, error):
    def source():
        yield from items(10)
        raise error

    stream = lx.lanes_stream(collatz, source(), num_lanes=4, prefetch=prefetch)
    assert found(it.islice(stream, 10)) == {i: expected(i + 1) for i in range(10)}
    with pytest.raises(error):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def limited(n):
    return lx.fori_loop(0, n, lambda i, x: 2 * x, jnp.float32(1), max_steps=5)


def test_an_integer_that_does_not_fit_is_refused():
    """It would become another one: 2**32 + 1 is 1 in int32."""
    message = "item 1 is 4294967297, expected integers that fit into int32"
    with jax.enable_x64(False), pytest.raises(OverflowError, match=message):
        list(lx.lanes_stream(collatz, [np.int32(1), 2**32 + 1], num_lanes=2))


def test_an_error_of_an_item_names_it():
    counts = [np.int32(n) for n in (1, 9, 2)]
    stream = lx.lanes_stream(limited, counts, num_lanes=2, ordered=True)
    assert next(stream) == (0, 2.0)
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"item 1 of lanes_stream: .*max_steps=5"):
        next(stream)
    assert dict(lx.lanes_stream(limited, counts, num_lanes=2, throw=False)) == {0: 2.0, 1: 32.0, 2: 4.0}


def until(n, throw=True):
    go_on = lambda c: c[0] < n
    return lx.while_loop(go_on, lambda c: (c[0] + 1, 2 * c[1]), (0, jnp.float32(1)), max_steps=5, throw=throw)[1]


@pytest.mark.parametrize("f", [limited, until, lambda n: until(n, throw=False)], ids=["fori", "while", "silent"])
def test_the_numbers_of_an_item(f):
    counts = [np.int32(n) for n in (1, 9, 2)]
    (first, of_first), (second, of_second), (third, of_third) = (
        found for _, found in lx.lanes_stream(f, counts, num_lanes=2, ordered=True, throw=False, info=True)
    )
    assert (float(first), float(second), float(third)) == (2.0, 32.0, 4.0)
    assert (of_first, of_third) == (lx.StreamInfo(1, False, None), lx.StreamInfo(2, False, None))
    assert of_second[:2] == (5, True)
    assert of_second.error is None or "item 1 of lanes_stream" in of_second.error
    assert (of_second.error is None) == (f not in (limited, until))
    raising = lx.lanes_stream(f, counts, num_lanes=2, ordered=True, info=True)
    assert next(raising) == (0, (2.0, lx.StreamInfo(1, False, None)))
    if of_second.error is not None:
        with pytest.raises(eqx.EquinoxRuntimeError, match=r"item 1 of lanes_stream: .*max_steps=5"):
            next(raising)


def test_the_numbers_of_a_loop_in_a_jit_are_refused():
    with pytest.raises(ValueError, match=r"lanes_stream\(info=True\): f calls no loop itself"):
        next(lx.lanes_stream(jax.jit(limited), [3], num_lanes=1, info=True))


def forgets(x):
    lx.fori_loop(0, 3, lambda i, c: c + i, x)
    return x


@pytest.mark.parametrize("f", [forgets, jax.jit(forgets), lambda x: x])
def test_a_loop_whose_results_are_not_used_does_not_count(f):
    message = r"holds none. \(A loop does not count if its results are not used: return them.\)"
    with pytest.raises(ValueError, match=message):
        next(lx.lanes_stream(f, [1.0], num_lanes=1))
    with pytest.raises(ValueError, match=message):
        lx.lanes_map(f, np.ones(2), num_lanes=1)


def test_options_that_are_refused():
    stream: Any = lx.lanes_stream
    for error, words, options in (
        (TypeError, "lanes_stream\\(num_lanes=", {"num_lanes": 2.0}),
        (ValueError, "lanes_stream\\(num_lanes=", {"num_lanes": 0}),
        (ValueError, "lanes_stream\\(chunk_steps=", {"chunk_steps": 0}),
        (TypeError, "lanes_stream\\(prefetch=", {"prefetch": 1.5}),
        (ValueError, "lanes_stream\\(prefetch=", {"prefetch": -1}),
        (TypeError, r"lanes_stream\(progress=...\): got", {"progress": "yes"}),
    ):
        with pytest.raises(error, match=words):
            stream(collatz, [], **options)
    with pytest.raises(TypeError, match=r"items=\.\.\.\): got a int, expected an iterable"):
        stream(collatz, 3)
    with pytest.raises(TypeError, match=r"inside of `jax.jit`"):
        jax.jit(lambda: list(stream(collatz, items(3))))()


@pytest.mark.parametrize("taken", [0, 3, 30])
def test_an_order_cannot_begin_in_the_middle(taken):
    stream = lx.lanes_stream(collatz, items(100), num_lanes=4)
    first = list(it.islice(stream, taken))
    suspended = stream.suspend()
    rest = items(100)[suspended.fetched :]
    with pytest.raises(ValueError, match="Go on with ordered=False"):
        lx.lanes_stream(collatz, rest, num_lanes=4, resume=suspended, ordered=True)
    assert found([*first, *lx.lanes_stream(collatz, rest, num_lanes=4, resume=suspended)]) == ANSWERS[100]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("ordered", [False, True])
def test_several_threads_take_results_of_one_stream(prefetch, ordered):
    stream = lx.lanes_stream(collatz, items(100), num_lanes=4, chunk_steps=3, prefetch=prefetch, ordered=ordered)
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: list(stream), range(4)))
    assert found(it.chain(*taken)) == ANSWERS[100]
    assert sum(map(len, taken)) == 100
    assert not ordered or all(one == sorted(one) for one in taken)


def test_close_does_not_wait_for_an_item():
    """Another thread is waiting for one that never comes."""
    is_asked, is_over = Event(), Event()

    def numbers():
        yield from items(2)
        is_asked.set()
        is_over.wait(60)

    stream = lx.lanes_stream(collatz, numbers(), num_lanes=4)
    taken = []
    thread = Thread(target=lambda: taken.extend(stream))
    thread.start()
    is_asked.wait(60)
    stream.close()
    thread.join(60)
    assert not thread.is_alive()
    assert not is_over.is_set()
    is_over.set()
    with pytest.raises(StopIteration):
        next(stream)


def test_suspend_waits_for_the_results_of_other_threads():
    stream = lx.lanes_stream(collatz, items(100), num_lanes=4, chunk_steps=3)
    results = {}

    def take():
        results.update([next(iter(found([next(stream)]).items())) for _ in range(10)])

    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(take) for _ in range(2)]
        threads[0].result()
        state = stream.suspend()
        threads[1].exception()  # StopIteration, where it has not come to its end
    rest = found(lx.lanes_stream(collatz, items(100)[state.fetched :], num_lanes=4, resume=state))
    assert len(rest) >= 80
    assert len(results) >= 10
    assert {**results, **rest}.items() <= ANSWERS[100].items()


def test_an_interrupt_of_the_wait_loses_nothing(monkeypatch):
    stream, waits = lx.lanes_stream(collatz, items(100), num_lanes=4, chunk_steps=3), []
    wait = jax.device_get

    def interrupted(chunk):
        waits.append(1)
        if len(waits) % 3 == 0:
            raise KeyboardInterrupt
        return wait(chunk)

    monkeypatch.setattr(jax, "device_get", interrupted)
    results, interrupts = {}, 0
    while len(results) < 100:
        try:
            results |= found([next(stream)])
        except KeyboardInterrupt:
            interrupts += 1
    assert results == ANSWERS[100]
    assert interrupts > 3


def test_a_stream_whose_function_raises_is_closed():
    def fail(_):
        raise ZeroDivisionError

    def fails(n):
        jax.debug.callback(fail, n)
        return collatz(n)

    stream = lx.lanes_stream(fails, items(9), num_lanes=2)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        list(stream)
    with pytest.raises(StopIteration):
        next(stream)
