"""The run of a durable loop: chunk after chunk, with saves in between."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.durable.chunk import Chunk
from loopax._src.durable.hosts import agreed, all_agree
from loopax._src.durable.interrupts import Interrupts
from loopax._src.durable.pace import Pace
from loopax._src.durable.row_plan import RowPlan
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.durable.writer import Writer

EPOCH = MOST_STEPS + 1  # steps that have keys of one stream
_POLL_SECONDS = 0.05
_FIRST_POLL_SECONDS = 1e-4


@dataclass(frozen=True)
class DurableRun:
    """Everything that a run needs, but for where it stands."""

    where: str  # in error messages
    chunk: Chunk
    start: Callable[[int], Sequence[Any]]  # what steps are handed from this one on
    total: int | None  # steps
    saves: Saves
    writer: Writer | None
    rows: RowPlan | None
    pace: Pace
    stops: bool  # whether a condition may end the loop


def advance(run: DurableRun, state: SavedState, interrupts: Interrupts, show: Callable[[int], None]) -> SavedState:
    """Run to the end, saving; an interrupt saves too, and is raised then."""
    run.pace.begin(state.steps)
    while state.goes_on and state.steps != run.total:
        most = _next_chunk(run, state.steps)
        count = _in_a_row(run, state.steps, most)
        must_wait = run.pace.must_wait(state.steps, most * count)
        signal, most, count, must_wait = agreed(interrupts.received or 0, most, count, int(must_wait))
        if signal:
            _stop(run, state, interrupts, signal)
        if must_wait:
            _settle(run)
            if all_agree(run.pace.must_wait(state.steps, most * count)):
                _save(run, state)
                _settle(run)
        state = _take(run, state, most, count)
        show(state.steps)
        if not run.saves.in_progress():
            run.pace.saved()
        if all_agree(run.pace.should_save(state.steps)):
            _save(run, state)
    _save(run, state)
    _settle(run)
    (signal,) = agreed(interrupts.received or 0)
    if signal:
        _stop(run, state, interrupts, signal)
    return state


def _next_chunk(run: DurableRun, steps: int) -> int:
    """Steps of the next chunk, within its rows."""
    return min(run.pace.chunk(steps), run.chunk.rows, _ahead(run, steps))


def _ahead(run: DurableRun, steps: int) -> int:
    """Steps to the end of the epoch of keys, or of the loop."""
    epoch = EPOCH - steps % EPOCH
    return epoch if run.total is None else min(epoch, run.total - steps)


def _in_a_row(run: DurableRun, steps: int, most: int) -> int:
    """How many such chunks to start at once, so that no device waits for Python between them.

    One where a condition may end the loop, or where rows of outputs have to be fetched.
    """
    if run.stops or run.chunk.rows < MOST_STEPS:
        return 1
    ahead = _ahead(run, steps)
    if run.pace.every.in_steps:
        ahead = min(ahead, run.pace.next_save - steps)
    return max(min(run.pace.in_a_row(most), ahead // most), 1)


def _take(run: DurableRun, state: SavedState, most: int, count: int) -> SavedState:
    """Take a chunk of steps, or several; rows of outputs begin to be written."""
    begun, arrays = time.monotonic(), state.arrays
    *before, last = (state.steps + i * most for i in range(count))
    for steps in before:
        arrays, *_ = run.chunk.run(arrays, run.start(steps), most)
    arrays, ys, num_steps, goes_on = run.chunk.run(arrays, run.start(last), most)
    step_seconds = run.pace.step_seconds
    _wait(num_steps, None if step_seconds is None else count * most * step_seconds)
    taken = (count - 1) * most + int(num_steps)
    run.pace.took(taken, time.monotonic() - begun)
    if run.writer is not None and run.rows is not None and taken:
        pieces = [np.asarray(y)[:taken] for y in ys]
        pieces = [(piece[::-1] if run.rows.reverse else piece).copy() for piece in pieces]
        run.writer.write(run.rows.lowest(state.steps, taken), pieces)
    return SavedState(state.steps + taken, bool(goes_on), arrays)


def _wait(x: Any, expected_seconds: float | None) -> None:
    """Wait for a result, so that Python can handle signals meanwhile where that takes long or nobody knows."""
    pause = _POLL_SECONDS if expected_seconds else _FIRST_POLL_SECONDS
    while (expected_seconds is None or expected_seconds > 10 * _POLL_SECONDS) and not x.is_ready():
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    x.block_until_ready()


def _save(run: DurableRun, state: SavedState) -> None:
    """Begin to save a state, once the rows that belong to it are on disk."""
    if run.saves.newest_step == state.steps:
        return
    if run.writer is not None:
        run.writer.flush()
    run.saves.start(state)
    run.pace.saving(state.steps)


def _settle(run: DurableRun) -> None:
    """Wait until what has been saved is on disk."""
    begun = time.monotonic()
    run.saves.finish()
    run.pace.saved()
    run.pace.idle += time.monotonic() - begun


def _stop(run: DurableRun, state: SavedState, interrupts: Interrupts, signal: int) -> None:
    """Save, and raise what the interrupt is."""
    interrupts.received = signal
    _save(run, state)
    _settle(run)
    raise interrupts.stop(
        f"{run.where}: interrupted after {state.steps} steps, which are saved in {run.saves.directory.parent}. "
        "The same call goes on from there."
    )
