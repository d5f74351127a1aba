"""The run of a durable loop: chunk after chunk, with saves in between."""

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import numpy as np

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.durable.chunk import EPOCH, CompiledChunk, Job, placed, rows_of_a_chunk, trace
from loopax._src.durable.files import locked
from loopax._src.durable.options import agreed, all_agree, check
from loopax._src.durable.outputs import Outputs
from loopax._src.durable.pace import Interrupts, watching
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.durable.stored_program import compare_with_stored, describe, refuse_unsavable, types_of
from loopax._src.frontend.options import limit_message
from loopax._src.frontend.raising import with_amounts
from loopax._src.frontend.steps import always, first_condition
from loopax._src.frontend.trace import trace_step
from loopax._src.nnx.functional import hand_over
from loopax._src.progress import Shown
from loopax._src.pytrees.leaves import LoopInfo, restore_weak

_POLL_SECONDS = 0.05
_FIRST_POLL_SECONDS = 1e-4


@dataclass(frozen=True)
class DurableRun:
    """Everything that a run needs, but for where it stands."""

    job: Job
    chunk: CompiledChunk
    saves: Saves

    def advance(self, state: SavedState, interrupts: Interrupts, shown: Shown) -> tuple[SavedState, list[Any]]:
        """Run to the end, saving; an interrupt saves too, and is raised then. Also the numbers of a step that broke."""
        broken: list[Any] = []
        saves, pace, before = self.saves, self.saves.pace, state.steps
        pace.begin(before)
        while state.goes_on and state.steps != self.job.total and not broken:
            most, count = self._next_chunks(state.steps)
            must_wait = pace.must_wait(state.steps, most * count)
            signal, most, count, must_wait = agreed(interrupts.received or 0, most, count, int(must_wait))
            if signal:
                break
            if must_wait:
                saves.finish()
                if all_agree(pace.must_wait(state.steps, most * count)):
                    saves.save(state)
                    saves.finish()
            state, broken = self._take(state, most, count)
            shown.update(state.steps - before)
            saves.look()
            if all_agree(pace.should_save(state.steps)):
                saves.save(state)
        saves.end(state, interrupts, f"{state.steps} steps")
        return state, broken

    def _next_chunks(self, steps: int) -> tuple[int, int]:
        """Steps of the next chunk, within its rows, and how many such chunks to start at once.

        Several, so that no device waits for Python between them; one where a condition may end the loop, or where rows
        of outputs have to be fetched.
        """
        job, pace = self.job, self.saves.pace
        ahead = EPOCH - steps % EPOCH  # to the end of the epoch of keys, or of the loop
        if job.total is not None:
            ahead = min(ahead, job.total - steps)
        most = min(pace.chunk(steps), self.chunk.rows, ahead)
        if job.stops or job.options.finite or self.chunk.rows < MOST_STEPS:
            return most, 1
        if pace.in_steps:
            ahead = min(ahead, pace.next_save - steps)
        return most, max(min(pace.in_a_row(most), ahead // most), 1)

    def _take(self, state: SavedState, most: int, count: int) -> tuple[SavedState, list[Any]]:
        """Take a chunk of steps, or several; rows of outputs begin to be written. As `advance`."""
        job, pace, outputs = self.job, self.saves.pace, self.saves.outputs
        begun, arrays = time.perf_counter(), state.arrays
        *before, last = (state.steps + i * most for i in range(count))
        for steps in before:
            arrays, *_ = self.chunk.run(arrays, job.start(steps), most)
        arrays, ys, (num_steps, goes_on, *broken) = self.chunk.run(arrays, job.start(last), most)
        # Wait, so that Python can handle signals meanwhile where that takes long or nobody knows.
        expected = None if pace.step_seconds is None else count * most * pace.step_seconds
        pause = _POLL_SECONDS if expected else _FIRST_POLL_SECONDS
        while (expected is None or expected > 10 * _POLL_SECONDS) and not num_steps.is_ready():
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)
        taken = (count - 1) * most + int(num_steps)
        pace.took(taken, time.perf_counter() - begun)
        if outputs is not None and outputs.writes and taken:
            outputs.write(state.steps, [np.asarray(y)[:taken] for y in ys])
        steps = state.steps + taken
        return SavedState(steps, bool(goes_on), arrays), [steps, *broken[2:]] if broken and broken[0] else []


# A durable loop from its arguments to its results.


def run_job(job: Job, *durability: Any) -> Any:
    """What the user gets of a loop; `durability` is what `check` takes."""
    options, name = job.options, job.options.name
    if job.cut and not job.stops and options.throw:
        raise ValueError(limit_message(name, job.total))
    root, pace, keep, anyway = check(name, *durability, unroll=job.unroll)
    start = job.start(0)
    # A chunk of one row describes the program, whatever the number of rows.
    one = trace(job, start, job.rows and 1)
    refuse_unsavable(name, [*types_of("carry", one.spec), *types_of("outputs", one.y_spec)])
    with locked(name, root):
        # A chunk has as many steps as its outputs have rows; how many there may be, `one` has told.
        rows = None
        if job.rows and one.y_spec.avals:
            rows = min(rows_of_a_chunk(one, job.unroll), max(job.rows.capacity, 1))
        traced = trace(job, start, rows) if job.rows else one
        chunk = CompiledChunk(traced, start, MOST_STEPS if rows is None else rows)
        step = trace_step(job.step, start, one.init, always if job.stops else None)
        compare_with_stored(name, root, describe(job, step, one, chunk.first), anyway)
        outputs = Outputs(name, root, traced.y_spec, job.rows) if job.rows else None
        with closing(Saves(name, root, keep, pace, outputs)) as saves:
            state, broken = _go_on(job, chunk, saves)
        if broken and options.throw:
            raise eqx.EquinoxRuntimeError(with_amounts(traced.broken, broken))
        reached = state.steps == job.total and state.goes_on and (job.cut or job.condition is not None)
        if reached and options.throw:
            raise eqx.EquinoxRuntimeError(limit_message(name, job.total))
        last = traced.spec.unpack(restore_weak(state.arrays, traced.carry_avals))
        carry = hand_over(job.where, job.init, last, traced.changes)
        numbers = [np.int64(state.steps), np.bool_(reached)]
        if traced.broken:
            step, leaf = (state.steps, traced.broken.leaf_number(broken)) if broken else (-1, -1)
            numbers += [np.bool_(len(broken) > 0), np.int64(step), np.int32(leaf)]
        loop_info = LoopInfo(*numbers)  # pyright: ignore[reportArgumentType]
        return options.with_info((carry, outputs.rows()) if outputs else carry, loop_info)


def _go_on(job: Job, chunk: CompiledChunk, saves: Saves) -> tuple[SavedState, list[Any]]:
    """Run to the end from the newest save that is whole, or from the first state; as of `DurableRun.advance`."""
    state = saves.newest(chunk.first)
    if state is None and job.condition is not None:
        goes_on, arrays = first_condition(job.where, job.condition, [], chunk.traced.spec, chunk.first)
        state = SavedState(0, bool(goes_on), placed(arrays))
    state = state or SavedState(0, True, chunk.first)
    if job.total is not None and state.steps > job.total:
        raise ValueError(
            f"{saves.where}: the stored run has taken {state.steps} steps, and only {job.total} are asked for. Ask for "
            "as many or more, or give another directory."
        )
    if saves.outputs:
        saves.outputs.open(state.steps)
    # There is one bar for all chunks. What is shown is counted from here, so that the rate is that of this process.
    shown = Shown(job.options.reporter(job.called.functions[0]), job.total)
    shown.begin(state.steps)
    try:
        with watching() as interrupts:
            found = DurableRun(job, chunk, saves).advance(state, interrupts, shown)
            shown.end(finished=True)
            return found
    finally:
        shown.end(finished=False)
