"""`lanes_stream`: streams that are suspended, and go on."""

import itertools as it
import time

import jax
import numpy as np
import pytest

import loopax as lx
from tests.queues.streams import CHAOTIC, chaotic, collatz, items


def bits(results):
    return {index: [x.tobytes() for x in jax.tree.leaves(result)] for index, result in results}


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


def test_a_closed_stream_is_not_suspended():
    with lx.lanes_stream(chaotic, CHAOTIC, lanes=8) as stream:
        next(stream)
    with pytest.raises(ValueError, match=r"the stream is closed"):
        stream.suspend()


def test_only_failed_results_are_left():
    limited = lambda n: lx.fori_loop(0, n, lambda i, x: x + 1, 0, max_steps=5)
    stream = lx.lanes_stream(limited, [9, 1, 8], lanes=4, throw=False)
    first = next(stream)
    rest = [first, *lx.lanes_stream(limited, [], lanes=4, throw=False, resume=stream.suspend())]
    assert {index: error is not None for index, _, error in rest} == {0: True, 1: False, 2: True}


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
