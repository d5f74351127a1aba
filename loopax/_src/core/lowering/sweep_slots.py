"""A reverse sweep with slots: `saved` holds as many states as may be stored, and is used for all others too.

Run by run, from the last to the first: from the last stored state on, states are evaluated again, and
stored where the binomial schedule says, until all that remain fit into the free slots (but for the very
last, which is current when it is needed). This run of states is stored, and read on the way back. Where residuals
fit into the slots (`sweep_bodies.py`), the run stores those instead, and no step is evaluated on the way back.
`schedule.binomial.replay` has the same schedule in Python.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax._src import schedule
from loopax._src.core.ir.loop import EMPTY_SLOT
from loopax._src.core.lowering.rows import LoopState, RowLoop, Steps, read, write
from loopax._src.core.lowering.sweep_bodies import Bodies, Run, Track
from loopax._src.jax_internals import where, zeros


class Segment(NamedTuple):
    """The steps from a current state to the end of what has not been walked back."""

    state: list[Any]
    step: Any  # before which the state is
    slot: Any  # for this state, which may be stored there; all slots before it are in use, those after it free
    stored_steps: Any  # int32[slots]: before which step the state in each slot is
    slots: list[Any]


class BinomialState(NamedTuple):
    """The state of a running reverse sweep."""

    segment: Segment  # the last one that has not been walked back
    end: Any  # the step behind it
    progress: LoopState  # the backward walk


def sweep_slots(track: Track, bodies: Bodies, checkpoint_rows: Any, saved: list[Any], progress: LoopState) -> LoopState:
    """Walk back through all steps."""
    stored_steps = jnp.where(checkpoint_rows == EMPTY_SLOT, 0, track.step(checkpoint_rows))
    last = jnp.maximum(jnp.sum(checkpoint_rows != EMPTY_SLOT, dtype=jnp.int32) - 1, 0)
    segment = Segment([read(s, last) for s in saved], stored_steps[last], last, stored_steps, saved)

    def one_run(sweep: BinomialState) -> BinomialState:
        divide = _divide_and_store if bodies.replay_is_long else _divide_then_store
        last, run = divide(track, bodies, sweep.segment, sweep.end)

        # Walk the run backward, from what the last step would have stored. A step also reads what the step before it
        # needs: for the first step of the run, that is what stands in the slot before it.
        def take(body: Run, row: Any, position: Any, values: list[Any]) -> tuple[list[Any], list[Any]]:
            carry, y = bodies.back(body, row, values[num_stored:], values[:num_stored])
            before = run.slot + position - 1  # may be -1 after the very last step: anything will do then
            return [*(read(run.slots[place], before) for place in bodies.places), *carry], y

        num_stored, steps = len(last), Steps(bodies.backward, take, track.ahead, track.row(run.step))
        start = LoopState([*last, *sweep.progress.carry], sweep.progress.ys, sweep.end - run.step - 1)
        walked = RowLoop(reverse=True, unroll=track.ahead.unroll).run(steps, start, jnp.int32(-1))
        progress = walked._replace(carry=walked.carry[num_stored:])
        slot = jnp.maximum(run.slot - 1, 0)
        state = [read(s, slot) for s in run.slots] if bodies.records else walked.carry[:num_stored]
        segment = Segment(state, run.stored_steps[slot], slot, run.stored_steps, run.slots)
        return BinomialState(segment, run.step, progress)

    sweep = BinomialState(segment, track.num_steps, progress)
    return lax.while_loop(lambda sweep: sweep.end > 0, one_run, sweep).progress


def _divide_then_store(track: Track, bodies: Bodies, segment: Segment, end: Any) -> tuple[list[Any], Segment]:
    """Find and store the next run; returns what its last step would store, and its first step, with all slots."""
    count, walk = segment.stored_steps.size, RowLoop(reverse=False, unroll=track.ahead.unroll)

    # Pass on, leaving states in slots, to where all states from there on fit into the free slots.
    def too_long(segment: Segment) -> Any:
        free = count - segment.slot
        return (free > 0) & (end - segment.step > free + 1)

    def shorter(segment: Segment) -> Segment:
        state, step, slot, stored_steps, slots = segment
        slots = [write(s, slot, value) for s, value in zip(slots, state, strict=True)]
        distance = schedule.advance(end - step, count - slot)
        take = lambda body, row, _, state: (bodies.step(body, row, state)[0], [])  # noqa: E731
        steps = Steps(bodies.forward, take, track.ahead, track.row(step))
        passed = walk.run(steps, LoopState(state, [], jnp.int32(0)), distance)
        return Segment(passed.carry, step + distance, slot + 1, write(stored_steps, slot, step), slots)

    run = lax.while_loop(too_long, shorter, segment)
    # Store what all of its steps but the last one do.
    steps = bodies.replay_steps(track.ahead, track.row(run.step), written=lambda position: run.slot + position)
    start = LoopState(run.state, [run.slots[place] for place in bodies.places], jnp.int32(0))
    replayed = walk.run(steps, start, end - run.step - 1)
    slots, last = list(run.slots), replayed.carry
    for place, slot in zip(bodies.places, replayed.ys, strict=True):
        slots[place] = slot
    if bodies.records:
        row = track.row(end - 1)
        _, last = bodies.step(bodies.replay.at(row).run, row, last)
    return last, run._replace(slots=slots)


class OneLoop(NamedTuple):
    """The state of `_divide_and_store`."""

    now: Segment
    next_step: Any  # before which it is decided what to store
    run: Any  # the first step of the run, and its slot; the step is -1 before the run
    last: list[Any]  # what the step before would have stored


def _divide_and_store(track: Track, bodies: Bodies, segment: Segment, end: Any) -> tuple[list[Any], Segment]:
    """`_divide_then_store` in one loop, so that the program holds a long step once for both.

    Each iteration evaluates a step and writes to a slot. Where nothing is to be stored, it writes what is there.
    """
    count = segment.stored_steps.size
    # The state before the last step is current when it is needed; the record of the last step is to be computed.
    stop = end if bodies.records else end - 1

    def one_step(at: OneLoop) -> OneLoop:
        (state, step, slot, stored_steps, slots), next_step, (run_step, run_slot), _ = at
        remain, free = end - step, count - slot
        decides = (step == next_step) & (run_step < 0)
        divides = decides & (free > 0) & (remain > free + 1)
        begins_run = decides & ~divides
        run_step, run_slot = jnp.where(begins_run, step, run_step), jnp.where(begins_run, slot, run_slot)
        in_run = run_step >= 0
        row = track.row(step)
        state_after, stored = bodies.step(bodies.replay.at(row).run, row, state)
        in_slots = dict(zip(bodies.places, stored, strict=True))
        place = jnp.clip(jnp.where(in_run, run_slot + step - run_step, slot), 0, count - 1)
        stores = divides | (in_run & (remain > 1))

        # Before: what is in the slot. After: the state, a record in a run, or what was there.
        def put(leaf: int, array: Any, of_state: Any) -> Any:
            old = read(array, place)
            return write(array, place, where(stores, where(in_run, in_slots.get(leaf, old), of_state), old))

        slots = [put(leaf, *pair) for leaf, pair in enumerate(zip(slots, state, strict=True))]
        distance = lax.cond(
            divides,
            lambda: schedule.advance(jnp.maximum(remain, 2), jnp.maximum(free, 1)),
            lambda: jnp.zeros_like(step),
        )
        position = jnp.minimum(slot, count - 1)
        stored_steps = write(stored_steps, position, jnp.where(divides, step, stored_steps[position]))
        now = Segment(state_after, step + 1, slot + divides.astype(jnp.int32), stored_steps, slots)
        return OneLoop(now, next_step + distance, (run_step, run_slot), stored)

    zero_step = jnp.zeros_like(segment.step)
    start = OneLoop(segment, segment.step, (zero_step - 1, segment.slot), list(map(zeros, bodies.stored_avals)))
    done = lax.while_loop(lambda at: at.now.step < stop, one_step, start)
    run_step, run_slot = done.run
    # A run of one step that is current already takes no iteration.
    run_step, run_slot = jnp.where(run_step < 0, end - 1, run_step), jnp.where(run_step < 0, done.now.slot, run_slot)
    last = done.last if bodies.records else done.now.state
    return last, done.now._replace(step=run_step, slot=run_slot)
