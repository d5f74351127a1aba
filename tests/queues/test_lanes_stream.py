"""`lanes_stream`: every item once, with the results of `f` alone, whatever the source and the lanes do."""

import itertools as it
import re
import threading
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import loopax as lx
from loopax._src.queues import working_lanes
from loopax._src.queues.pace import FIRST, SECONDS, Pace


def collatz(n):
    """Steps to 1, and the largest number on the way."""
    body = lambda at: (jnp.where(at[0] % 2 == 0, at[0] // 2, 3 * at[0] + 1), jnp.maximum(at[0], at[1]), at[2] + 1)
    at = lx.while_loop(lambda at: at[0] != 1, body, (n, n, jnp.int32(0)), max_steps=200)
    return {"steps": at[2], "most": at[1]}


def expected(n):
    steps, most = 0, n
    while n != 1:
        most, n, steps = max(most, n), n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    return steps, most


def items(count):
    return [np.int32(n) for n in range(1, count + 1)]


def found(stream):
    return {index: (int(result["steps"]), int(result["most"])) for index, result in stream}


ANSWERS = {count: {i: expected(i + 1) for i in range(count)} for count in (0, 1, 5, 100)}


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


def bits(results):
    return {index: [x.tobytes() for x in jax.tree.leaves(result)] for index, result in results}


def chaotic(item):
    step = lambda i, x: 3.9 * x * (1 - x)
    return lx.fori_loop(0, item["n"], step, item["x"], max_steps=300)


CHAOTIC = [{"n": np.int32(5 + 37 * i % 290), "x": np.float32(0.1 + 0.01 * i)} for i in range(60)]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 17, 59])
def test_suspended_streams_go_on_to_the_same_bits(taken, ordered):
    whole = bits(lx.lanes_stream(chaotic, CHAOTIC, lanes=8))
    stream = lx.lanes_stream(chaotic, CHAOTIC, lanes=8, ordered=ordered, chunk_steps=5)
    first = list(it.islice(stream, taken))
    state = stream.suspend()
    leaves, treedef = jax.tree.flatten(state)
    assert all(isinstance(leaf, int | np.ndarray | np.generic) for leaf in leaves)
    state = treedef.unflatten(map(np.array, leaves))
    rest = list(lx.lanes_stream(chaotic, CHAOTIC[int(state.fetched) :], lanes=8, ordered=ordered, resume=state))
    assert bits([*first, *rest]) == whole
    assert len(first) + len(rest) == len(whole)
    if ordered:
        assert [index for index, _ in [*first, *rest]] == list(range(60))


def test_suspended_again_and_again():
    whole, got, state, rest = bits(lx.lanes_stream(chaotic, CHAOTIC, lanes=8)), [], None, CHAOTIC
    while True:
        stream = lx.lanes_stream(chaotic, rest, lanes=8, resume=state, chunk_steps=3)
        got += it.islice(stream, 7)
        if len(got) == len(whole):
            break
        state = stream.suspend()
        rest = CHAOTIC[state.fetched :]
    assert bits(got) == whole


def test_resume_with_other_lanes_is_refused():
    stream = lx.lanes_stream(chaotic, CHAOTIC, lanes=8)
    next(stream)
    state = stream.suspend()
    with pytest.raises(ValueError, match=r"the suspended stream has 8 lanes, and lanes=4\. Give lanes=8"):
        lx.lanes_stream(chaotic, [], lanes=4, resume=state)


def test_a_closed_stream_is_not_suspended():
    with lx.lanes_stream(chaotic, CHAOTIC, lanes=8) as stream:
        next(stream)
    with pytest.raises(ValueError, match=r"the stream is closed"):
        stream.suspend()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_source_comes_after_the_results(prefetch):
    def source():
        yield from items(10)
        raise OSError("gone")

    stream = lx.lanes_stream(collatz, source(), lanes=4, prefetch=prefetch)
    assert found(it.islice(stream, 10)) == {i: expected(i + 1) for i in range(10)}
    with pytest.raises(OSError, match="gone"):
        next(stream)


TWO = np.zeros(2, np.float32)
OTHERS = {
    "shape": ({"x": np.zeros(3, np.float32), "n": 1}, r"item 2\['x'\] is float32\[3\], expected float32\[2\]"),
    "dtype": ({"x": np.zeros(2, np.int32), "n": 1}, r"item 2\['x'\] is int32\[2\], expected float32\[2\]"),
    "structure": ({"x": TWO}, r"item 2 has the structure PyTreeDef\({'x': \*}\), expected"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_items_unlike_the_first(name):
    """The results of those before it come first."""
    other, words = OTHERS[name]
    alike = {"x": TWO + 1, "n": 3}
    f = lambda item: lx.fori_loop(0, item["n"], lambda i, x: 2 * x, item["x"], max_steps=9)
    stream = lx.lanes_stream(f, [alike, alike, other, alike], lanes=2)
    assert sorted(next(stream)[0] for _ in range(2)) == [0, 1]
    with pytest.raises(TypeError, match=words):
        next(stream)


def test_static_leaves_must_be_those_of_the_first():
    f = lambda item: lx.fori_loop(0, item["n"], lambda i, x: 2 * x, jnp.float32(1), max_steps=9)
    with pytest.raises(ValueError, match=r"item 1\['name'\] is 'b', expected 'a'"):
        list(lx.lanes_stream(f, [{"n": 1, "name": "a"}, {"n": 1, "name": "b"}], lanes=2))


def limited(n):
    return lx.fori_loop(0, n, lambda i, x: 2 * x, jnp.float32(1), max_steps=5)


def test_an_error_of_an_item_names_it():
    counts = [np.int32(n) for n in (1, 9, 2)]
    stream = lx.lanes_stream(limited, counts, lanes=2, ordered=True)
    assert next(stream) == (0, 2.0)
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"item 1 of lanes_stream: .*max_steps=5"):
        next(stream)
    results = {index: (float(y), error) for index, y, error in lx.lanes_stream(limited, counts, lanes=2, throw=False)}
    assert (results[0], results[2]) == ((2.0, None), (4.0, None))
    assert "item 1 of lanes_stream" in results[1][1]


def test_options_that_are_refused():
    stream: Any = lx.lanes_stream
    for error, words, options in (
        (TypeError, "lanes_stream\\(lanes=", {"lanes": 2.0}),
        (ValueError, "lanes_stream\\(lanes=", {"lanes": 0}),
        (ValueError, "lanes_stream\\(chunk_steps=", {"chunk_steps": 0}),
        (TypeError, "lanes_stream\\(prefetch=", {"prefetch": 1.5}),
        (ValueError, "lanes_stream\\(prefetch=", {"prefetch": -1}),
    ):
        with pytest.raises(error, match=words):
            stream(collatz, [], **options)
    with pytest.raises(TypeError, match=r"items=\.\.\.\): got a int, expected an iterable"):
        stream(collatz, 3)
    with pytest.raises(ValueError, match=r"lanes_stream\(f, \.\.\.\): f must hold exactly one loop"):
        list(lx.lanes_stream(lambda x: x, items(3)))


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


def test_integers_that_do_not_fit_are_refused():
    with jax.enable_x64(False), pytest.raises(OverflowError, match=r"item 1 is 4294967297, expected integers that fit"):
        list(lx.lanes_stream(collatz, [np.int32(1), 2**32 + 1], lanes=2))


def test_keys_of_another_kind_are_refused():
    draw = lambda key: lx.fori_loop(0, 3, lambda i, x: x + jax.random.normal(jax.random.fold_in(key, i)), 0.0)
    key, other = jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")
    for second in (other, jax.random.key_data(key)):
        with pytest.raises(TypeError, match=r"item 1 is .*PRNG key.*, expected a PRNG key of rbg"):
            list(lx.lanes_stream(draw, [key, second], lanes=2))


def test_streams_under_other_settings_are_compiled_again():
    def draw(n):
        key = jax.random.key(n)
        return lx.fori_loop(0, 3, lambda i, x: x + jax.random.normal(jax.random.fold_in(key, i)), 0.0)

    first = dict(lx.lanes_stream(draw, items(3), lanes=2))
    with jax.default_prng_impl("rbg"):
        second = lx.lanes_stream(draw, items(3), lanes=2)
    second = dict(second)  # the settings are those where it was made
    assert all(second[i] != first[i] for i in range(3))
    assert dict(lx.lanes_stream(draw, items(3), lanes=2)) == first


@pytest.mark.parametrize("taken", [0, 3, 30])
def test_an_order_cannot_begin_in_the_middle(taken):
    stream = lx.lanes_stream(collatz, items(100), lanes=4)
    first = list(it.islice(stream, taken))
    suspended = stream.suspend()
    rest = items(100)[suspended.fetched :]
    with pytest.raises(ValueError, match="Go on with ordered=False"):
        lx.lanes_stream(collatz, rest, lanes=4, resume=suspended, ordered=True)
    assert found([*first, *lx.lanes_stream(collatz, rest, lanes=4, resume=suspended)]) == ANSWERS[100]


def test_only_failed_results_are_left():
    limited = lambda n: lx.fori_loop(0, n, lambda i, x: x + 1, 0, max_steps=5)
    stream = lx.lanes_stream(limited, [9, 1, 8], lanes=4, throw=False)
    first = next(stream)
    rest = [first, *lx.lanes_stream(limited, [], lanes=4, throw=False, resume=stream.suspend())]
    assert {index: error is not None for index, _, error in rest} == {0: True, 1: False, 2: True}


def test_another_function_does_not_go_on_with_suspended_lanes():
    long = lambda n: lx.fori_loop(0, 10**6, lambda i, x: x + n, jnp.int32(0))
    stream = lx.lanes_stream(long, items(4), lanes=2, chunk_steps=1)
    while not stream._working.num_busy:
        stream._look()
    suspended = stream.suspend()
    with pytest.raises(ValueError, match="those of another function"):
        lx.lanes_stream(collatz, [], lanes=2, resume=suspended)


def test_an_error_of_the_source_is_not_lost_by_suspending():
    class SourceError(Exception):
        pass

    def numbers():
        yield from items(5)
        raise SourceError

    stream = lx.lanes_stream(collatz, numbers(), lanes=2)
    next(stream)
    time.sleep(0.2)
    stream.suspend()
    with pytest.raises(SourceError):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    with lx.lanes_stream(collatz, numbers(), lanes=2) as stream:
        next(stream)
        time.sleep(0.2)
    with pytest.raises(StopIteration):
        next(stream)


def test_a_stream_inside_of_jit_is_refused():
    with pytest.raises(TypeError, match=r"inside of `jax.jit`"):
        jax.jit(lambda: list(lx.lanes_stream(collatz, items(3))))()


def test_ctrl_c_in_the_iterable_is_raised_at_once_without_a_thread():
    def numbers():
        yield from items(40)
        raise KeyboardInterrupt

    results = []
    with pytest.raises(KeyboardInterrupt):
        results.extend(lx.lanes_stream(collatz, numbers(), lanes=32, prefetch=0))
    assert len(results) < 40


def test_an_interrupt_of_the_wait_loses_nothing(monkeypatch):
    stream, waits = lx.lanes_stream(collatz, items(100), lanes=4, chunk_steps=3), []
    wait = working_lanes.wait_for

    def interrupted(chunk):
        waits.append(1)
        if len(waits) % 3 == 0:
            raise KeyboardInterrupt
        return wait(chunk)

    monkeypatch.setattr(working_lanes, "wait_for", interrupted)
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

    stream = lx.lanes_stream(fails, items(9), lanes=2)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        list(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_progress_of_a_resumed_stream_counts_unfinished_items(capsys):
    stream = lx.lanes_stream(collatz, items(100), lanes=4)
    first = list(it.islice(stream, 10))
    suspended = stream.suspend()
    rest = items(100)[suspended.fetched :]
    progress = lx.Progress(every=0.001)
    list(lx.lanes_stream(collatz, rest, lanes=4, resume=suspended, progress=progress))
    last = capsys.readouterr().err.splitlines()[-1]
    finished = int(last.split(": ")[1].split(" items")[0])
    assert finished == 100 - len(first) - len(suspended.results)


def test_a_model_that_changes_itself_is_refused():
    class Counting(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.int32(0))

        def __call__(self, n):
            self.count[...] += 1
            return collatz(n)

    with pytest.raises(TypeError, match="f of lanes_stream changes an NNX object in itself"):
        list(lx.lanes_stream(Counting(), items(3), lanes=2))
