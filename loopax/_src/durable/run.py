"""The run of a durable loop: chunk after chunk, with saves in between."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.durable import chunk as chunks
from loopax._src.durable.chunk import Chunk
from loopax._src.durable.identity import describe, refuse_unsavable, types_of
from loopax._src.durable.identity import settle as settle_program
from loopax._src.durable.options import Checked, Durability, agreed, all_agree, check, locked
from loopax._src.durable.outputs import Outputs, RowPlan, Writer
from loopax._src.durable.pace import Interrupts, Pace, shown, watching
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.frontend import options as arguments
from loopax._src.frontend import trace as tracing
from loopax._src.frontend.checks import settle
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.run import LoopSpec, run
from loopax._src.frontend.steps import Call, always, first_condition
from loopax._src.nnx.functional import thaw
from loopax._src.nnx.writeback import hand_over
from loopax._src.pytrees.leaves import LoopInfo, restore_weak
from loopax._src.pytrees.static import Called

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
        run.writer.write(run.rows.taken(state.steps, taken)[0], pieces)
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


# A durable loop from its arguments to its results.


@dataclass(frozen=True)
class Job:
    """What is to be run: the arguments of a loop, understood."""

    options: arguments.Options
    where: str  # the user's function in error messages
    called: Called  # this one, first of the user's functions
    call: Call  # of a step
    start: Callable[[int], list[Any]]  # what a step is handed that comes after so many
    init: Any
    total: int | None  # steps at most
    cut: bool = False  # `max_steps` makes them fewer
    stops: bool = False  # `call` says whether to go on
    condition: tracing.FirstCondition | None = None  # whether to take the first step
    unroll: int = 1
    rows: RowPlan | None = None
    settings: dict[str, str] = field(default_factory=dict)  # what else makes it another program
    arrays: dict[str, Any] = field(default_factory=dict)  # known by name among what the chunk closes over


def step_key_data(options: arguments.Options, steps: int) -> list[Any]:
    """The data of the key from which keys of steps are made, after so many; none without a key.

    After each 2**31 steps there is another one: keys are folded with 32 bits.
    """
    if options.key_data is None or steps < EPOCH:
        return options.extras
    key, impl = options.key_data, options.key_impl
    key = key if impl is None else jax.random.wrap_key_data(key, impl=impl)
    key = jax.random.fold_in(jax.random.fold_in(key, 2**32 - 1), steps // EPOCH)
    return [key if impl is None else jax.random.key_data(key)]


def run_job(job: Job, durability: Durability) -> tuple[Any, Any, LoopInfo]:
    """The carry, the rows of outputs and the numbers of a loop."""
    name = job.options.name
    if job.cut and not job.stops and job.options.throw:
        raise ValueError(arguments.limit_message(name, job.total))
    checked = check(name, durability)
    start = job.start(0)
    traced = chunks.trace(job.where, _walk(job), job.init, start, job.rows and 1)
    refuse_unsavable(name, [*types_of("carry", traced.spec), *types_of("outputs", traced.y_spec)])
    with locked(name, checked.directory):
        return _run(job, checked, traced, start)


def _compile(job: Job, traced: chunks.TracedChunk, start: list[Any]) -> chunks.Chunk:
    """A chunk of as many steps as its outputs have rows; how many there may be, tracing one of one row has told."""
    if job.rows is None:
        return chunks.compile_chunk(traced, start, MOST_STEPS)
    rows = None
    if traced.y_spec.avals:
        rows = min(chunks.rows_of_a_chunk(traced, job.unroll), max(job.rows.capacity, 1))
    traced = chunks.trace(job.where, _walk(job), job.init, start, rows)
    return chunks.compile_chunk(traced, start, MOST_STEPS if rows is None else rows)


def _run(job: Job, checked: Checked, one: chunks.TracedChunk, start: list[Any]) -> tuple[Any, Any, LoopInfo]:
    """`one` describes the program: a chunk of one row, whatever the number of rows."""
    name, directory = job.options.name, checked.directory
    chunk = _compile(job, one, start)
    _settle_program(job, checked, one, chunk.first, start)
    saves = Saves(name, directory, checked.keep)
    try:
        outputs = Outputs(name, directory, chunk.traced.y_spec, job.rows) if job.rows else None
        if outputs and saves.newest_step:
            outputs.refuse_gone()
        check_rows = (lambda state: outputs.check(state.steps)) if outputs else None
        state = saves.newest(chunk.first, check_rows) or _first_state(job, chunk)
        _refuse_shorter(name, state, job.total)
        if outputs:
            outputs.open(state.steps)
        has_rows = bool(chunk.traced.y_spec.avals)
        writer = Writer(directory.outputs) if has_rows and jax.process_index() == 0 else None
        pace = Pace(checked.every, checked.chunk_steps, job.unroll)
        run = DurableRun(name, chunk, job.start, job.total, saves, writer, job.rows, pace, job.stops)
        reporter = job.options.reporter(job.called.functions[0])
        with watching() as interrupts, shown(reporter, state.steps, job.total) as show:
            state = advance(run, state, interrupts, show)
    finally:
        saves.close()
    return _results(job, chunk, state, outputs.rows() if outputs else None)


def _settle_program(
    job: Job, checked: Checked, one: chunks.TracedChunk, first: Sequence[jax.Array], start: list[Any]
) -> None:
    """Whether the run that is stored, if there is one, is the one that is asked for."""
    step = tracing.trace_step(_step(job), start, one.init, always if job.stops else None)
    name = job.options.name
    described = describe(name, step, one, first, job.arrays, job.options.key_data, job.settings)
    settle_program(name, checked.directory, described, checked.anyway)


def _step(job: Job) -> tracing.Step:
    return tracing.Step(job.call, job.where, (job.call,), job.options.key_spec, job.called)


def _walk(job: Job) -> chunks.TakeSteps:
    """A chunk of the loop."""

    def walk(carry: Any, start: Sequence[Any], most: Any, rows: int | None) -> chunks.StepsTaken:
        bound = MOST_STEPS if rows is None else rows  # without one, a condition alone would stop the loop
        extent = Extent(0, most, bound, fixed=False, capacity=rows)
        step = _step(job)
        name, kind, lanes = job.options.name, job.options.kind, job.options.lanes
        how = LoopSpec(name, extent, reverse=False, unroll=job.unroll, kind=kind, lanes=lanes)
        first = always if job.stops else None
        done = run(step, how, start, carry, None, first)
        goes_on = jnp.ones((), bool) if done.goes_on is None else done.goes_on
        results = settle((done.carry, done.ys, done.num_steps, goes_on), done.checks)
        return chunks.StepsTaken(done.hand_over(results[0]), thaw(results[1]), *results[2:])

    return walk


def _first_state(job: Job, chunk: chunks.Chunk) -> SavedState:
    """The state before the first step."""
    if job.condition is None:
        return SavedState(0, True, chunk.first)
    goes_on, arrays = first_condition(job.where, job.condition, [], chunk.traced.spec, chunk.first)
    return SavedState(0, bool(goes_on), chunks.placed(arrays))


def _refuse_shorter(name: str, state: SavedState, total: int | None) -> None:
    if total is not None and state.steps > total:
        raise ValueError(
            f"{name}: the stored run has taken {state.steps} steps, and only {total} are asked for. Ask for as many "
            "or more, or give another directory."
        )


def _results(job: Job, chunk: chunks.Chunk, state: SavedState, ys: Any) -> tuple[Any, Any, LoopInfo]:
    """What the loop returns, or an error where `max_steps` has stopped it."""
    traced = chunk.traced
    reached = state.steps == job.total and state.goes_on and (job.cut or job.condition is not None)
    if reached and job.options.throw:
        raise eqx.EquinoxRuntimeError(arguments.limit_message(job.options.name, job.total))
    last = traced.spec.unpack(restore_weak(state.arrays, traced.carry_avals))
    carry = hand_over(job.where, job.init, last, traced.changes)
    return carry, ys, LoopInfo(np.int64(state.steps), np.bool_(reached))  # pyright: ignore[reportArgumentType]
