"""The run of a durable loop: chunk after chunk, with saves in between."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.durable import chunk as chunks
from loopax._src.durable.chunk import CompiledChunk, RowPlan
from loopax._src.durable.identity import describe, refuse_unsavable, types_of
from loopax._src.durable.identity import settle as settle_program
from loopax._src.durable.options import Checked, agreed, all_agree, check, locked
from loopax._src.durable.outputs import Outputs, Writer
from loopax._src.durable.pace import Interrupts, SavePace, shown, watching
from loopax._src.durable.saves import Keeper, SavedState, Saves
from loopax._src.frontend import options as arguments
from loopax._src.frontend import trace as tracing
from loopax._src.frontend.checks import settle
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.run import run
from loopax._src.frontend.steps import Call, always, first_condition
from loopax._src.nnx.functional import hand_over, thaw
from loopax._src.pytrees.leaves import LoopInfo, restore_weak
from loopax._src.pytrees.static import Called

EPOCH = MOST_STEPS + 1  # steps that have keys of one stream
_POLL_SECONDS = 0.05
_FIRST_POLL_SECONDS = 1e-4


@dataclass(frozen=True)
class DurableRun:
    """Everything that a run needs, but for where it stands."""

    chunk: CompiledChunk
    start: Callable[[int], Sequence[Any]]  # what steps are handed from this one on
    total: int | None  # steps
    keeper: Keeper
    writer: Writer | None
    rows: RowPlan | None
    pace: SavePace
    stops: bool  # whether a condition may end the loop


def advance(run: DurableRun, state: SavedState, interrupts: Interrupts, show: Callable[[int], None]) -> SavedState:
    """Run to the end, saving; an interrupt saves too, and is raised then."""
    keeper, pace = run.keeper, run.pace
    pace.begin(state.steps)
    while state.goes_on and state.steps != run.total:
        most, count = _next_chunks(run, state.steps)
        must_wait = pace.must_wait(state.steps, most * count)
        signal, most, count, must_wait = agreed(interrupts.received or 0, most, count, int(must_wait))
        if signal:
            break
        if must_wait:
            keeper.settle()
            if all_agree(pace.must_wait(state.steps, most * count)):
                keeper.save(state)
                keeper.settle()
        state = _take(run, state, most, count)
        show(state.steps)
        keeper.look()
        if all_agree(pace.should_save(state.steps)):
            keeper.save(state)
    keeper.save(state)
    keeper.settle()
    (signal,) = agreed(interrupts.received or 0)
    if signal:
        interrupts.received = signal
        raise keeper.interrupted(interrupts, f"{state.steps} steps")
    return state


def _next_chunks(run: DurableRun, steps: int) -> tuple[int, int]:
    """Steps of the next chunk, within its rows, and how many such chunks to start at once.

    Several, so that no device waits for Python between them; one where a condition may end the loop, or where rows of
    outputs have to be fetched.
    """
    ahead = EPOCH - steps % EPOCH  # to the end of the epoch of keys, or of the loop
    if run.total is not None:
        ahead = min(ahead, run.total - steps)
    most = min(run.pace.chunk(steps), run.chunk.rows, ahead)
    if run.stops or run.chunk.rows < MOST_STEPS:
        return most, 1
    if run.pace.every.in_steps:
        ahead = min(ahead, run.pace.next_save - steps)
    return most, max(min(run.pace.in_a_row(most), ahead // most), 1)


def _take(run: DurableRun, state: SavedState, most: int, count: int) -> SavedState:
    """Take a chunk of steps, or several; rows of outputs begin to be written."""
    begun, arrays = time.monotonic(), state.arrays
    *before, last = (state.steps + i * most for i in range(count))
    for steps in before:
        arrays, *_ = run.chunk.run(arrays, run.start(steps), most)
    arrays, ys, num_steps, goes_on = run.chunk.run(arrays, run.start(last), most)
    # Wait, so that Python can handle signals meanwhile where that takes long or nobody knows.
    expected = None if run.pace.step_seconds is None else count * most * run.pace.step_seconds
    pause = _POLL_SECONDS if expected else _FIRST_POLL_SECONDS
    while (expected is None or expected > 10 * _POLL_SECONDS) and not num_steps.is_ready():
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    taken = (count - 1) * most + int(num_steps)
    run.pace.took(taken, time.monotonic() - begun)
    if run.writer is not None and run.rows is not None and taken:
        pieces = [np.asarray(y)[:taken] for y in ys]
        pieces = [(piece[::-1] if run.rows.reverse else piece).copy() for piece in pieces]
        run.writer.write(run.rows.taken(state.steps, taken)[0], pieces)
    return SavedState(state.steps + taken, bool(goes_on), arrays)


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


def run_job(job: Job, *durability: Any) -> tuple[Any, Any, LoopInfo]:
    """The carry, the rows of outputs and the numbers of a loop; `durability` is what `check` takes."""
    name = job.options.name
    if job.cut and not job.stops and job.options.throw:
        raise ValueError(arguments.limit_message(name, job.total))
    checked = check(name, *durability)
    start = job.start(0)
    # A chunk of one row describes the program, whatever the number of rows.
    one = chunks.trace(job.where, _walk(job), job.init, start, job.rows and 1)
    refuse_unsavable(name, [*types_of("carry", one.spec), *types_of("outputs", one.y_spec)])
    with locked(name, checked.directory):
        # A chunk has as many steps as its outputs have rows; how many there may be, `one` has told.
        rows = None
        if job.rows and one.y_spec.avals:
            rows = min(chunks.rows_of_a_chunk(one, job.unroll), max(job.rows.capacity, 1))
        traced = chunks.trace(job.where, _walk(job), job.init, start, rows) if job.rows else one
        chunk = chunks.compile_chunk(traced, start, MOST_STEPS if rows is None else rows)
        step = tracing.trace_step(_step(job), start, one.init, always if job.stops else None)
        described = describe(name, step, one, chunk.first, job.arrays, job.options.key_data, job.settings)
        settle_program(name, checked.directory, described, checked.anyway)
        outputs = Outputs(name, checked.directory.outputs, chunk.traced.y_spec, job.rows) if job.rows else None
        state = _go_on(job, checked, chunk, outputs)
        return _results(job, chunk, state, outputs.rows() if outputs else None)


def _go_on(job: Job, checked: Checked, chunk: chunks.CompiledChunk, outputs: Outputs | None) -> SavedState:
    """Run to the end from the newest save that is whole, or from the first state."""
    name, directory = job.options.name, checked.directory
    saves = Saves(name, directory, checked.keep)
    try:
        if outputs and saves.newest_step:
            outputs.refuse_gone()
        state = saves.newest(chunk.first, (lambda state: outputs.check(state.steps)) if outputs else None)
        if state is None and job.condition is not None:
            goes_on, arrays = first_condition(job.where, job.condition, [], chunk.traced.spec, chunk.first)
            state = SavedState(0, bool(goes_on), chunks.placed(arrays))
        state = state or SavedState(0, True, chunk.first)
        if job.total is not None and state.steps > job.total:
            raise ValueError(
                f"{name}: the stored run has taken {state.steps} steps, and only {job.total} are asked for. Ask for as "
                "many or more, or give another directory."
            )
        if outputs:
            outputs.open(state.steps)
        has_rows = bool(chunk.traced.y_spec.avals)
        writer = Writer(directory.outputs) if has_rows and jax.process_index() == 0 else None
        pace = SavePace(checked.every, checked.chunk_steps, job.unroll)
        keeper = Keeper(saves, pace, writer.flush if writer else None)
        run = DurableRun(chunk, job.start, job.total, keeper, writer, job.rows, pace, job.stops)
        reporter = job.options.reporter(job.called.functions[0])
        with watching() as interrupts, shown(reporter, state.steps, job.total) as show:
            return advance(run, state, interrupts, show)
    finally:
        saves.close()


def _step(job: Job) -> tracing.Step:
    return tracing.Step(job.call, job.where, job.called, job.options.key_spec, own=(job.call,))


def _walk(job: Job) -> chunks.TakeSteps:
    """A chunk of the loop."""

    def walk(carry: Any, start: Sequence[Any], most: Any, rows: int | None) -> chunks.StepsTaken:
        bound = MOST_STEPS if rows is None else rows  # without one, a condition alone would stop the loop
        extent = Extent(0, most, bound, fixed=False, capacity=rows, unroll=job.unroll)
        options = replace(job.options, progress=None, throw=True)
        done = run(_step(job), options, extent, start, carry, goes_on=always if job.stops else None)
        goes_on = jnp.ones((), bool) if done.goes_on is None else done.goes_on
        results = settle((done.carry, done.ys, done.num_steps, goes_on), done.checks)
        return chunks.StepsTaken(done.hand_over(results[0]), thaw(results[1]), *results[2:])

    return walk


def _results(job: Job, chunk: chunks.CompiledChunk, state: SavedState, ys: Any) -> tuple[Any, Any, LoopInfo]:
    """What the loop returns, or an error where `max_steps` has stopped it."""
    traced = chunk.traced
    reached = state.steps == job.total and state.goes_on and (job.cut or job.condition is not None)
    if reached and job.options.throw:
        raise eqx.EquinoxRuntimeError(arguments.limit_message(job.options.name, job.total))
    last = traced.spec.unpack(restore_weak(state.arrays, traced.carry_avals))
    carry = hand_over(job.where, job.init, last, traced.changes)
    return carry, ys, LoopInfo(np.int64(state.steps), np.bool_(reached))  # pyright: ignore[reportArgumentType]
