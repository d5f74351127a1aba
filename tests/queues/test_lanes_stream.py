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
from loopax._src.queues.working_lanes import FIRST, SECONDS, ChunkPace
from tests.queues.streams import ANSWERS, CHAOTIC, chaotic, collatz, expected, found, items


@pytest.mark.parametrize("lanes", [1, 4, 64])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_item_once(lanes, prefetch):
    for count, answers in ANSWERS.items():
        assert found(lx.lanes_stream(collatz, items(count), num_lanes=lanes, prefetch=prefetch)) == answers
    ordered = lx.lanes_stream(collatz, items(100), num_lanes=lanes, prefetch=prefetch, ordered=True)
    assert [index for index, _ in ordered] == list(range(100))


@pytest.mark.parametrize("chunk_steps", [1, 7, 1000])
def test_chunks_change_nothing(chunk_steps):
    assert found(lx.lanes_stream(collatz, items(100), num_lanes=8, chunk_steps=chunk_steps)) == ANSWERS[100]


def test_results_in_the_order_in_which_they_finish():
    lengths = [np.int32(n) for n in (150, 1, 1, 1)]
    count = lambda n: lx.fori_loop(0, n, lambda i, s: s + 1, jnp.int32(0), max_steps=200)
    assert next(index for index, _ in lx.lanes_stream(count, lengths, num_lanes=2, chunk_steps=1)) == 1


def test_an_endless_source():
    with lx.lanes_stream(collatz, map(np.int32, it.count(1)), num_lanes=8) as stream:
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

    stream = lx.lanes_stream(collatz, source(), num_lanes=4)
    index, result = next(stream)
    assert (index, int(result["steps"])) == (0, 111)
    seen.set()
    assert [index for index, _ in stream] == [1]


def test_items_of_several_arrays_keys_and_numbers():
    def walk(item):
        step = lambda i, x, key: x + item["scale"] * jax.random.normal(key)
        return lx.fori_loop(0, item["n"], step, jnp.zeros(2), key=item["key"], max_steps=20)

    given = [{"scale": 0.5, "n": 3 + i, "key": jax.random.key(i)} for i in range(9)]
    results = dict(lx.lanes_stream(walk, given, num_lanes=4))
    for index, item in enumerate(given):
        np.testing.assert_allclose(results[index], walk(item), rtol=1e-6)


def test_one_compilation_for_any_number_of_items_and_other_weights():
    traced = []

    class Decay(eqx.Module):
        rate: jax.Array

        def __call__(self, n):
            traced.append(1)
            return lx.fori_loop(0, n, lambda i, x: self.rate * x, jnp.ones(2, jnp.float32), max_steps=20)

    for rate, count in ((0.5, 1), (0.5, 20), (0.25, 5)):
        results = dict(lx.lanes_stream(Decay(jnp.float32(rate)), items(count), num_lanes=2))
        expected = [rate**n for n in range(1, count + 1)]
        np.testing.assert_allclose([results[i][0] for i in range(count)], expected, rtol=1e-6)
    assert len(traced) == 1


def test_a_stream_that_is_left_early_frees_its_lanes():
    before = len(jax.live_arrays())
    with lx.lanes_stream(collatz, map(np.int32, it.count(1)), num_lanes=8) as stream:
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
    stream = lx.lanes_stream(collatz, given, num_lanes=4, chunk_steps=8, progress=lx.Progress("numbers", 0.001, "text"))
    assert found(stream) == ANSWERS[100]
    shown = capsys.readouterr().err
    assert re.search(rf"numbers: \d+{'/100' if sized else ''} items.*items/s, .*steps/s.*[0-4] lanes? active", shown)
    assert re.search(r"numbers: 100 items in 0:00:\d\d, .*items/s\n$", shown)
    with lx.lanes_stream(collatz, items(100), num_lanes=4, chunk_steps=8, progress=lx.Progress(every=0.001)) as stream:
        next(stream)  # left early
    assert "lanes_stream: last seen after" in capsys.readouterr().err
    list(lx.lanes_stream(collatz, items(9), num_lanes=4, progress=False))
    assert capsys.readouterr().err == ""


def test_report_of_a_stream():
    # Items are fetched in between, and steps taken so many at a time: else threads and clocks have a say.
    stream = lx.lanes_stream(collatz, items(100), num_lanes=8, prefetch=0, chunk_steps=16)
    list(stream)
    report = stream.report()
    assert (report.items, report.lanes) == (100, 8)
    assert report.useful == sum(steps for steps, _ in ANSWERS[100].values())
    assert 0.85 < report.share < 1.0  # the last items leave lanes empty
    assert report.share_fed > 0.95
    assert report.iterations_fed < report.iterations
    assert "100 items through 8 lanes" in str(report)
    with pytest.raises(TypeError, match=r"a stream, which has a report of its own: `stream.report\(\)`"):
        lx.lane_report(stream)


def test_items_are_fetched_with_the_settings_of_the_caller():
    """The thread that fetches has settings of JAX of its own, and a program belongs to some."""
    doubled = lambda x: lx.fori_loop(0, 3, lambda i, x: 2 * x, x)
    seen = []

    def numbers():
        for x in (1.5, 2.5):
            seen.append(jnp.asarray(x).dtype)
            yield x

    for x64, dtype in ((False, np.float32), (True, np.float64)):
        seen.clear()
        with jax.enable_x64(x64):
            stream = lx.lanes_stream(doubled, numbers(), num_lanes=2)
        results = dict(stream)  # the settings are those where it was made
        assert [results[i].dtype for i in range(2)] == seen == [dtype] * 2
        assert results == {0: 12.0, 1: 20.0}


def test_a_chunk_takes_as_many_steps_as_fit_into_its_time():
    pace = ChunkPace(None)
    pace.measured(FIRST, SECONDS, at_most=False)
    assert pace.steps == FIRST
    pace.measured(FIRST, SECONDS / 1e6, at_most=False)
    assert FIRST < pace.steps < 100 * FIRST  # not at once: one measurement is not much
    grown = pace.steps
    pace.measured(FIRST, 10 * SECONDS, at_most=True)  # the host was late: nobody knows how long it took
    assert pace.steps == grown
    pace.measured(FIRST, 2 * SECONDS, at_most=False)
    assert pace.steps == FIRST // 2
    given = ChunkPace(7)
    given.measured(7, SECONDS / 1e6, at_most=False)
    assert given.steps == 7


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterable_may_write_into_its_array_again(prefetch):
    def numbers():
        one = np.zeros((), np.int32)
        for n in range(1, 101):
            one[...] = n
            yield one

    assert found(lx.lanes_stream(collatz, numbers(), num_lanes=4, prefetch=prefetch)) == ANSWERS[100]


# ---- streams that are suspended, and go on


def bits(results):
    return {index: [x.tobytes() for x in jax.tree.leaves(result)] for index, result in results}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 17, 59])
def test_suspended_streams_go_on_to_the_same_bits(taken, ordered):
    whole = bits(lx.lanes_stream(chaotic, CHAOTIC, num_lanes=8))
    stream = lx.lanes_stream(chaotic, CHAOTIC, num_lanes=8, ordered=ordered, chunk_steps=5)
    first = list(it.islice(stream, taken))
    state = stream.suspend()
    leaves, treedef = jax.tree.flatten(state)
    assert all(isinstance(leaf, int | np.ndarray | np.generic) for leaf in leaves)
    state = treedef.unflatten(map(np.array, leaves))
    rest = list(lx.lanes_stream(chaotic, CHAOTIC[int(state.fetched) :], num_lanes=8, ordered=ordered, resume=state))
    assert bits([*first, *rest]) == whole
    assert len(first) + len(rest) == len(whole)
    if ordered:
        assert [index for index, _ in [*first, *rest]] == list(range(60))


def test_suspended_again_and_again():
    whole, got, state, rest = bits(lx.lanes_stream(chaotic, CHAOTIC, num_lanes=8)), [], None, CHAOTIC
    while True:
        stream = lx.lanes_stream(chaotic, rest, num_lanes=8, resume=state, chunk_steps=3)
        got += it.islice(stream, 7)
        if len(got) == len(whole):
            break
        state = stream.suspend()
        rest = CHAOTIC[state.fetched :]
    assert bits(got) == whole


def test_only_failed_results_are_left():
    limited = lambda n: lx.fori_loop(0, n, lambda i, x: x + 1, 0, max_steps=5)
    stream = lx.lanes_stream(limited, [9, 1, 8], num_lanes=4, throw=False, info=True)
    first = next(stream)
    rest = [first, *lx.lanes_stream(limited, [], num_lanes=4, throw=False, info=True, resume=stream.suspend())]
    assert {index: info[:2] for index, (_, info) in rest} == {0: (5, True), 1: (1, False), 2: (5, True)}
    assert {index for index, (_, info) in rest if info.error is not None} == {0, 2}


def test_an_error_of_the_source_is_not_lost_by_suspending():
    class SourceError(Exception):
        pass

    def numbers():
        yield from items(5)
        raise SourceError

    stream = lx.lanes_stream(collatz, numbers(), num_lanes=2)
    next(stream)
    time.sleep(0.2)
    stream.suspend()
    with pytest.raises(SourceError):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    with lx.lanes_stream(collatz, numbers(), num_lanes=2) as stream:
        next(stream)
        time.sleep(0.2)
    with pytest.raises(StopIteration):
        next(stream)
