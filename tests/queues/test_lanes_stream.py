"""`lanes_stream`: every item once, with the results of `f` alone, whatever the source and the lanes do."""

import itertools as it
import re
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.queues.chunks import FIRST, SECONDS, Pace
from tests.queues.streams import ANSWERS, collatz, expected, found, items


@pytest.mark.parametrize("count", ANSWERS)
@pytest.mark.parametrize("lanes", [1, 4, 64])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_item_once(count, lanes, prefetch):
    assert found(lx.lanes_stream(collatz, items(count), lanes=lanes, prefetch=prefetch)) == ANSWERS[count]


@pytest.mark.parametrize("chunk_steps", [1, 7, 1000])
def test_chunks_change_nothing(chunk_steps):
    assert found(lx.lanes_stream(collatz, items(100), lanes=8, chunk_steps=chunk_steps)) == ANSWERS[100]


def test_results_in_order():
    indices = [index for index, _ in lx.lanes_stream(collatz, items(100), lanes=8, ordered=True)]
    assert indices == list(range(100))


def test_results_in_the_order_in_which_they_finish():
    lengths = [np.int32(n) for n in (150, 1, 1, 1)]
    count = lambda n: lx.fori_loop(0, n, lambda i, s: s + 1, jnp.int32(0), max_steps=200)
    assert next(index for index, _ in lx.lanes_stream(count, lengths, lanes=2, chunk_steps=1)) == 1


def test_an_endless_source():
    with lx.lanes_stream(collatz, map(np.int32, it.count(1)), lanes=8) as stream:
        first = dict(it.islice(stream, 50))
    assert all(int(result["steps"]) == expected(index + 1)[0] for index, result in first.items())
    assert list(stream) == []


def test_a_slow_source_delays_nobody():
    """A result comes out while the source waits for something that depends on it."""
    seen = threading.Event()

    def source():
        yield np.int32(27)
        assert seen.wait(60)
        yield np.int32(1)

    stream = lx.lanes_stream(collatz, source(), lanes=4)
    index, result = next(stream)
    assert (index, int(result["steps"])) == (0, 111)
    seen.set()
    assert [index for index, _ in stream] == [1]


def test_items_of_several_arrays_keys_and_numbers():
    def walk(item):
        step = lambda i, x, key: x + item["scale"] * jax.random.normal(key)
        return lx.fori_loop(0, item["n"], step, jnp.zeros(2), key=item["key"], max_steps=20)

    given = [{"scale": 0.5, "n": 3 + i, "key": jax.random.key(i)} for i in range(9)]
    results = dict(lx.lanes_stream(walk, given, lanes=4))
    for index, item in enumerate(given):
        np.testing.assert_allclose(results[index], walk(item), rtol=1e-6)


class Decay(eqx.Module):
    rate: jax.Array

    def __call__(self, n):
        return lx.fori_loop(0, n, lambda i, x: self.rate * x, jnp.ones(2, jnp.float32), max_steps=20)


def test_modules_with_other_weights_share_a_program():
    traced = []

    class Counting(Decay):
        def __call__(self, n):
            traced.append(1)
            return super().__call__(n)

    for rate in (0.5, 0.25):
        results = dict(lx.lanes_stream(Counting(jnp.float32(rate)), items(5), lanes=2))
        np.testing.assert_allclose([results[i][0] for i in range(5)], [rate**n for n in range(1, 6)], rtol=1e-6)
    assert len(traced) == 1


def test_one_compilation_for_any_number_of_items():
    traced = []

    def counted(n):
        traced.append(1)
        return collatz(n)

    with jax.log_compiles():
        for count in (1, 5, 100):
            assert found(lx.lanes_stream(counted, items(count), lanes=4)) == ANSWERS[count]
    assert len(traced) == 1


def test_a_report():
    stream = lx.lanes_stream(collatz, items(100), lanes=8)
    list(stream)
    report = stream.report()
    assert (report.items, report.lanes) == (100, 8)
    assert report.useful == sum(steps for steps, _ in ANSWERS[100].values())
    assert 0.7 < report.share <= 1.0
    assert report.share_fed >= report.share
    assert "100 items through 8 lanes" in str(report)


def test_a_stream_that_is_left_early_frees_its_lanes():
    before = len(jax.live_arrays())
    with lx.lanes_stream(collatz, map(np.int32, it.count(1)), lanes=8) as stream:
        next(stream)
    del stream
    threads = [thread for thread in threading.enumerate() if thread.name == "loopax items"]
    for _ in range(100):
        threads = [thread for thread in threads if thread.is_alive()]
        if not threads:
            break
        time.sleep(0.05)
    assert not threads
    assert len(jax.live_arrays()) <= before + 1


@pytest.mark.parametrize("sized", [True, False])
def test_progress_shows_items_and_steps(sized, capsys):
    given = items(100) if sized else iter(items(100))
    stream = lx.lanes_stream(collatz, given, lanes=4, chunk_steps=8, progress=lx.Progress("numbers", 0.001, "text"))
    assert found(stream) == ANSWERS[100]
    shown = capsys.readouterr().err
    assert re.search(rf"numbers: \d+{'/100' if sized else ''} items.*items/s, .*steps/s.*[0-4] lanes? active", shown)
    assert re.search(r"numbers: 100 items in 0:00:\d\d, .*items/s\n$", shown)


def test_progress_of_a_stream_that_is_left_early(capsys):
    with lx.lanes_stream(collatz, items(100), lanes=4, chunk_steps=8, progress=lx.Progress(every=0.001)) as stream:
        next(stream)
    assert "lanes_stream: last seen after" in capsys.readouterr().err


def test_nothing_is_shown_unless_asked_for(capsys):
    list(lx.lanes_stream(collatz, items(9), lanes=4, progress=False))
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match=r"lanes_stream\(progress=...\): got"):
        lx.lanes_stream(collatz, items(9), progress="yes")  # pyright: ignore[reportArgumentType]


def test_lane_report_of_a_stream():
    stream = lx.lanes_stream(collatz, items(100), lanes=4)
    list(stream)
    report = lx.lane_report(stream)
    assert report == stream.report()
    assert (report.items, report.useful) == (100, sum(steps for steps, _ in ANSWERS[100].values()))
    with pytest.raises(TypeError, match="lane_report of a stream"):
        lx.lane_report(stream, lanes=lx.Compact())


def test_items_are_fetched_with_the_settings_of_the_caller():
    """The thread that fetches has settings of JAX of its own."""
    doubled = lambda x: lx.fori_loop(0, 3, lambda i, x: 2 * x, x)
    seen = []

    def numbers():
        for x in (1.5, 2.5):
            seen.append(jnp.asarray(x).dtype)
            yield x

    with jax.enable_x64(False):
        results = dict(lx.lanes_stream(doubled, numbers(), lanes=2))
    assert [results[i].dtype for i in range(2)] == seen == [np.float32] * 2
    with jax.enable_x64(True):
        results = dict(lx.lanes_stream(doubled, numbers(), lanes=2))
    assert [results[i].dtype for i in range(2)] == seen[2:] == [np.float64] * 2
    assert results == {0: 12.0, 1: 20.0}


def test_a_chunk_takes_as_many_steps_as_fit_into_its_time():
    pace = Pace(None)
    pace.measured(FIRST, SECONDS, at_most=False)
    assert pace.steps == FIRST
    pace.measured(FIRST, SECONDS / 1e6, at_most=False)
    assert FIRST < pace.steps < 100 * FIRST  # not at once: one measurement is not much
    grown = pace.steps
    pace.measured(FIRST, 10 * SECONDS, at_most=True)  # the host was late: nobody knows how long it took
    assert pace.steps == grown
    pace.measured(FIRST, 2 * SECONDS, at_most=False)
    assert pace.steps == FIRST // 2
    given = Pace(7)
    given.measured(7, SECONDS / 1e6, at_most=False)
    assert given.steps == 7


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterable_may_write_into_its_array_again(prefetch):
    def numbers():
        one = np.zeros((), np.int32)
        for n in range(1, 101):
            one[...] = n
            yield one

    assert found(lx.lanes_stream(collatz, numbers(), lanes=4, prefetch=prefetch)) == ANSWERS[100]


def test_streams_under_other_settings_are_compiled_again():
    def draw(n):
        key = jax.random.key(n)
        return lx.fori_loop(0, 3, lambda i, x: x + jax.random.normal(jax.random.fold_in(key, i)), 0.0)

    first = dict(lx.lanes_stream(draw, items(3), lanes=2))
    with jax.enable_x64(False):
        second = lx.lanes_stream(draw, items(3), lanes=2)
    second = dict(second)  # the settings are those where it was made
    assert all(second[i] != first[i] for i in range(3))
    assert dict(lx.lanes_stream(draw, items(3), lanes=2)) == first
