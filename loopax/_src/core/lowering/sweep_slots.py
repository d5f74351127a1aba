"""A reverse sweep with slots: `saved` holds as many states as may be stored, and is used for all others too.

Run by run, from the last to the first: from the last stored state on, states are evaluated again, and
stored where the binomial schedule says, until all that remain fit into the free slots (but for the very
last, which is current when it is needed). This run of states is stored, and read on the way back. Where residuals
fit into the slots (`sweep_bodies.py`), the run stores those instead, and no step is evaluated on the way back.
`schedule.binomial.replay` has the same schedule in Python.

Each turn of one loop divides the steps that remain, if they are too many for a run, and advances to the next state to
store; then it walks a run back, if what remains now is one. A turn that does neither finds out how to divide.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import schedule
from loopax._src.core.ir.loop import EMPTY_SLOT
from loopax._src.core.ir.plan import Slots
from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.util import split_list
from loopax._src.core.lowering.rows import LoopState, RowLoop, Steps, put, read
from loopax._src.core.lowering.sweep_bodies import Bodies, Run, Track
from loopax._src.jax_internals import where, zeros


class Segment(NamedTuple):
    """The steps from a current state to the end of what has not been walked back."""

    state: list[Any]
    step: Any  # before which the state is
    slot: Any  # for this state, which may be stored there; all slots before it are in use, those after it free
    division: schedule.Division


class Store(NamedTuple):
    """The slots, and of each that is in use the segment that begins with its state."""

    slots: list[Any]
    segments: Any  # uint32[slots, 3]: step, and division
    order: Any  # int32[slots]: where the slots of the states are, in the order of the states; None: as they are

    @classmethod
    def of(cls, sweep: ReverseSweep, track: Track, checkpoint_rows: Any, saved: list[Any]) -> tuple["Store", Any]:
        """What the forward loop has saved, and how many slots are in use. Divisions begin with r = 1."""
        assert checkpoint_rows.size == sweep.saving.num_checkpoint_rows()
        rows, order = checkpoint_rows, None
        if not (isinstance(sweep.saving, Slots) and sweep.saving.length_known):
            rows, order = jnp.split(checkpoint_rows, 2)
        steps = jnp.where(rows == EMPTY_SLOT, -1, track.step(rows)).astype(jnp.uint32)
        used = jnp.sum(rows != EMPTY_SLOT, dtype=jnp.int32)
        ones = jnp.ones_like(steps)
        return cls(saved, jnp.stack([steps, ones, ones], 1), order), used

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return self.segments.shape[0]

    def place(self, slot: Any) -> Any:
        """Where a slot is; reads and writes beyond the last slot, or before the first one, are of that slot."""
        return slot if self.order is None else read(self.order, slot)

    def segment(self, slot: Any) -> Segment:
        """The segment that begins with the state in a slot."""
        place, (step, *division) = self.place(slot), read(self.segments, slot)
        return Segment([read(s, place) for s in self.slots], step.astype(jnp.int32), slot, schedule.Division(*division))

    def put(self, segment: Segment, stores: Any) -> "Store":
        """With another segment in its slot, if `stores`."""
        place, row = self.place(segment.slot), jnp.stack([segment.step.astype(jnp.uint32), *segment.division])
        slots = [put(s, place, stores, value) for s, value in zip(self.slots, segment.state, strict=True)]
        return self._replace(slots=slots, segments=put(self.segments, segment.slot, stores, row))


class Turn(NamedTuple):
    """Which steps to evaluate again."""

    start: Any  # the first row
    passed: Any  # so many to advance
    run: Any  # so many to walk back, behind those
    slot: Any  # for the state before the run


class BinomialState(NamedTuple):
    """The state of a running reverse sweep."""

    segment: Segment  # the last one that has not been walked back
    end: Any  # the step behind it
    store: Store
    progress: LoopState  # the backward walk


def sweep_slots(track: Track, bodies: Bodies, checkpoint_rows: Any, saved: list[Any], progress: LoopState) -> LoopState:
    """Walk back through all steps."""
    store, used = Store.of(bodies.sweep, track, checkpoint_rows, saved)
    evaluated_again = _in_one_loop if bodies.in_one_loop else _in_two_loops

    def one_turn(at: BinomialState) -> BinomialState:
        (state, step, slot, division), end, store, progress = at
        free, remain = store.num_slots - slot, end - step
        too_long, some = remain > free + 1, jnp.maximum(free, 1)
        divides = too_long & ~division.is_too_low(remain, some)
        distance, passed, ahead = division.divided(jnp.maximum(remain, 2), some)
        store = store.put(Segment(state, step, slot, passed), divides)
        division = jax.tree.map(partial(jnp.where, divides), ahead, division.raised(some))
        # The current state is now that before `middle`.
        distance, one = (jnp.where(divides, number, 0) for number in (distance, jnp.ones_like(slot)))
        middle, remain, slot, free = step + distance, remain - distance, slot + one, free - one
        is_run = remain <= free + 1
        turn = Turn(track.row(step), distance, jnp.where(is_run, remain, 0), slot)
        state, last, slots = evaluated_again(track, bodies, store, turn, state)
        store = store._replace(slots=slots)

        # Walk the run backward, from what the last step would have stored. A step also reads what the step before it
        # needs: for the first step of the run, that is what stands in the slot before it.
        def take(body: Run, row: Any, position: Any, values: list[Any]) -> tuple[list[Any], list[Any]]:
            carry, y = bodies.back(body, row, values[num_stored:], values[:num_stored])
            before = store.place(slot + position - 1)  # -1 after the very last step: anything will do then
            return [*(read(slots[place], before) for place in bodies.places), *carry], y

        num_stored, steps = len(last), Steps(bodies.backward, take, track.ahead, track.row(middle))
        start = LoopState([*last, *progress.carry], progress.ys, turn.run - 1)
        walked = RowLoop(reverse=True, unroll=track.ahead.unroll).run(steps, start, jnp.int32(-1))
        popped = store.segment(jnp.maximum(slot - 1, 0))
        segment = jax.tree.map(partial(where, is_run), popped, Segment(state, middle, slot, division))
        if not bodies.records:  # it has been read, or nothing has been walked back
            segment = segment._replace(state=walked.carry[:num_stored])
        progress = walked._replace(carry=walked.carry[num_stored:])
        return BinomialState(segment, jnp.where(is_run, middle, end), store, progress)

    start = BinomialState(store.segment(jnp.maximum(used - 1, 0)), track.num_steps, store, progress)
    return lax.while_loop(lambda at: at.end > 0, one_turn, start).progress


# What is evaluated again in a turn, from the state before its first step. Results are the state before the last step
# of the run, or after it where records are stored, what this step would have stored, and the slots.
Again = tuple[list[Any], list[Any], list[Any]]


def _in_two_loops(track: Track, bodies: Bodies, store: Store, turn: Turn, state: list[Any]) -> Again:
    """One advances, and one stores what all steps of a run but the last one do."""
    run_start, slots = track.ahead.advance(turn.start, turn.passed), list(store.slots)
    take = lambda body, row, _, state: (bodies.step(body, row, state)[0], [])  # noqa: E731
    steps = Steps(bodies.forward, take, track.ahead, turn.start)
    walk = RowLoop(reverse=False, unroll=track.ahead.unroll)
    state = walk.run(steps, LoopState(state, [], jnp.int32(0)), turn.passed).carry
    steps = bodies.replay_steps(track.ahead, run_start, written=lambda position: store.place(turn.slot + position))
    replay = LoopState(state, [slots[place] for place in bodies.places], jnp.int32(0))
    state, rows, *_ = walk.run(steps, replay, turn.run - 1)
    for place, stored in zip(bodies.places, rows, strict=True):
        slots[place] = stored
    if not bodies.records:
        return state, state, slots

    def recorded(state: list[Any]) -> list[Any]:
        row = track.ahead.advance(run_start, turn.run - 1)
        return bodies.step(bodies.replay.at(row).run, row, state)[1]

    last = lax.cond(turn.run > 0, recorded, lambda _: list(map(zeros, bodies.stored_avals)), state)
    return state, last, slots


def _in_one_loop(track: Track, bodies: Bodies, store: Store, turn: Turn, state: list[Any]) -> Again:
    """So that the program holds a long step once. Where nothing is to be stored, a step writes what is there."""
    sizes = [len(state), len(bodies.stored_avals)]

    def take(body: Run, row: Any, position: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        state, _, slots = split_list(carry, sizes)
        state, stored = bodies.step(body, row, state)
        of_run = position - turn.passed
        place, stores = store.place(turn.slot + of_run), (of_run >= 0) & (of_run < turn.run - 1)
        for leaf, value in zip(bodies.places, stored, strict=True):
            slots[leaf] = put(slots[leaf], place, stores, value)
        return [*state, *stored, *slots], []

    # The state before the last step of a run is current when it is needed; the record of the last step is not.
    length = turn.passed + (turn.run if bodies.records else jnp.maximum(turn.run - 1, 0))
    start = LoopState([*state, *map(zeros, bodies.stored_avals), *store.slots], [], jnp.int32(0))
    steps = Steps(bodies.replay, take, track.ahead, turn.start)
    carry = RowLoop(reverse=False, unroll=track.ahead.unroll).run(steps, start, length).carry
    state, last, slots = split_list(carry, sizes)
    return state, last if bodies.records else state, slots
