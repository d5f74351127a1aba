"""A reverse sweep with slots: `saved` holds as many states as may be stored, and is used for all others too.

Run by run, from the last to the first: from the last stored state on, states are evaluated again, and
stored where the binomial schedule says, until all that remain fit into the free slots (but for the very
last, which is current when it is needed). This run of states is stored, and read on the way back. Where residuals
fit into the slots (`recording.py`), the run stores those instead, and no step is evaluated on the way back.
`schedule.binomial.replay` has the same schedule in Python.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax._src import schedule
from loopax._src.core.ir.loop import EMPTY_SLOT
from loopax._src.core.jaxpr.util import split_list
from loopax._src.core.lowering.sweep_common import Bodies, RowOf, Track
from loopax._src.core.lowering.while_loop import LoopState, RowLoop, Step, Steps, read, write


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
        run = _divide(track, bodies, sweep.segment, sweep.end)
        last, slots = _store_run(track, bodies, run, sweep.end)
        run = run._replace(slots=slots)
        before, progress = _walk_back(track, bodies, run, last, sweep.end, sweep.progress)
        slot = jnp.maximum(run.slot - 1, 0)
        state = [read(s, slot) for s in slots] if bodies.records else before
        segment = Segment(state, run.stored_steps[slot], slot, run.stored_steps, slots)
        return BinomialState(segment, run.step, progress)

    sweep = BinomialState(segment, track.num_steps, progress)
    return lax.while_loop(lambda sweep: sweep.end > 0, one_run, sweep).progress


def _divide(track: Track, bodies: Bodies, segment: Segment, end: Any) -> Segment:
    """Pass on, leaving states in slots, to where all states from there on fit into the free slots."""
    count = segment.stored_steps.size

    def too_long(segment: Segment) -> Any:
        free = count - segment.slot
        return (free > 0) & (end - segment.step > free + 1)

    def shorter(segment: Segment) -> Segment:
        state, step, slot, stored_steps, slots = segment
        slots = [write(s, slot, value) for s, value in zip(slots, state, strict=True)]
        distance = schedule.advance(end - step, count - slot)
        steps = _steps_ahead(track, bodies, segment)
        passed = RowLoop(reverse=False, unroll=track.ahead.unroll).run(
            steps, LoopState(state, [], jnp.int32(0)), distance
        )
        return Segment(passed.carry, step + distance, slot + 1, write(stored_steps, slot, step), slots)

    return lax.while_loop(too_long, shorter, segment)


def _steps_ahead(track: Track, bodies: Bodies, segment: Segment) -> Steps:
    """The steps of a segment, counted from its start."""

    def make(forward: Callable[..., Any], row_of: RowOf) -> Callable[[Sequence[Any]], Step]:
        def step(consts: Sequence[Any], position: Any, state: list[Any]) -> tuple[list[Any], list[Any]]:
            return forward(row_of(position), consts, state), []

        return lambda consts: partial(step, consts)

    return bodies.forward.steps(make, track.ahead, track.row(segment.step))


def _store_run(track: Track, bodies: Bodies, run: Segment, end: Any) -> tuple[list[Any], list[Any]]:
    """What the last step would store, and the slots with what the others have stored."""
    steps = bodies.replay_steps(track.ahead, track.row(run.step), written=lambda position: run.slot + position)
    used = [run.slots[place] for place in bodies.places]
    progress = LoopState(run.state, used, jnp.int32(0))
    progress = RowLoop(reverse=False, unroll=track.ahead.unroll).run(steps, progress, end - run.step - 1)
    slots = list(run.slots)
    for place, slot in zip(bodies.places, progress.ys, strict=True):
        slots[place] = slot
    if not bodies.records:
        return progress.carry, slots
    _, record = bodies.replay.once(track.row(end - 1), progress.carry)
    return record, slots


def _walk_back(
    track: Track, bodies: Bodies, run: Segment, last: list[Any], end: Any, progress: LoopState
) -> tuple[list[Any], LoopState]:
    """Walk the run backward; returns also what is in the slot before it."""

    def make(backward: Callable[..., Any], row_of: RowOf) -> Callable[[Sequence[Any]], Step]:
        def step(consts: Sequence[Any], position: Any, values: list[Any]) -> tuple[list[Any], list[Any]]:
            stored, carry = split_list(values, [len(last)])
            carry, y = backward(row_of(position), consts, carry, stored)
            before = run.slot + position - 1  # may be -1 after the very last step: anything will do then
            return [*(read(run.slots[place], before) for place in bodies.places), *carry], y

        return lambda consts: partial(step, consts)

    steps = bodies.backward.steps(make, track.ahead, track.row(run.step))
    start = LoopState([*last, *progress.carry], progress.ys, end - run.step - 1)
    progress = RowLoop(reverse=True, unroll=track.ahead.unroll).run(steps, start, jnp.int32(-1))
    before, carry = split_list(progress.carry, [len(last)])
    return before, progress._replace(carry=carry)
