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
from loopax._src.core.lowering.rows import LoopState, RowLoop, Steps, put, read, stored_first, while_asked, write
from loopax._src.core.lowering.sweep_bodies import Bodies, Run, Track
from loopax._src.jax_internals import where, zeros
from loopax._src.settings import calibration


class Store(NamedTuple):
    """The slots of states, in the order of their steps, and of each the steps from there on: its segment."""

    slots: list[Any]
    segments: Any  # uint32[slots + 1, 3]: the first step of each segment, and its division
    order: Any  # int32[2 slots + 1]: behind as many others, where the slots are; None: in their order

    @classmethod
    def of(cls, sweep: ReverseSweep, track: Track, checkpoint_rows: Any, saved: list[Any]) -> tuple["Store", Any]:
        """What the forward loop has saved, and how many slots are in use. Divisions begin with r = 1."""
        assert checkpoint_rows.size == sweep.saving.num_checkpoint_rows()
        in_order = isinstance(sweep.saving, Slots) and sweep.saving.length_known
        count = checkpoint_rows.size - 1
        rows, used = checkpoint_rows[: count if in_order else count // 2], checkpoint_rows[-1]
        steps = jnp.where(rows == EMPTY_SLOT, -1, track.step(rows)).astype(jnp.uint32)
        segments = with_one_more(steps, schedule.Division(*map(jnp.ones_like, (steps, steps))))
        return cls(saved, segments, None if in_order else checkpoint_rows), used

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return self.segments.shape[0] - 1

    def place(self, slot: Any) -> Any:
        """Where a slot is; reads and writes beyond the last slot, or before the first one, are of any slot."""
        return slot if self.order is None else read(self.order, self.num_slots + slot)

    def state(self, slot: Any) -> list[Any]:
        """The state in a slot."""
        place = self.place(slot)
        return [read(s, place) for s in self.slots]

    def segment(self, slot: Any) -> Any:
        """Of a slot: its row."""
        return read(self.segments, slot)

    def put(self, slot: Any, state: list[Any], *segments: tuple[Any, schedule.Division], stores: Any = None) -> "Store":
        """With a state in this slot, if `stores` (None: always), and in any case with its segment, and those behind it.

        The slot must be free, and if `stores`, there must be one.
        """
        place, written = self.place(slot), write if stores is None else partial(put, writes=stores)
        slots = [written(s, place, value=value) for s, value in zip(self.slots, state, strict=True)]
        rows = [(step.astype(jnp.uint32), *division) for step, division in segments]
        if not calibration().look:
            rows = jnp.stack([number for row in rows for number in row]).reshape(-1, 3)
            return self._replace(slots=slots, segments=lax.dynamic_update_slice_in_dim(self.segments, rows, slot, 0))
        # One kernel finds out what it writes, and may read a row of the table for that: it writes all of a new table.
        places, fields = jnp.arange(self.num_slots + 1, dtype=jnp.int32)[:, None], jnp.arange(3, dtype=jnp.int32)[None]
        table = self.segments
        for k, row in enumerate(rows):
            step, repetitions, below = row
            new = jnp.where(fields == 0, step, jnp.where(fields == 1, repetitions, below))
            table = jnp.where(places == slot + k, new, table)
        return self._replace(slots=slots, segments=table)


def in_segment(row: Any) -> tuple[Any, schedule.Division]:
    """The first step of a segment, and its division."""
    step, *division = row
    return step.astype(jnp.int32), schedule.Division(*division)


def with_one_more(steps: Any, divisions: schedule.Division) -> Any:
    """The segments of all slots, and room for those of a state that has none."""
    return jnp.pad(jnp.stack([steps.astype(jnp.uint32), *divisions], 1), [(0, 1), (0, 0)])


class Turn(NamedTuple):
    """Which steps to evaluate again."""

    start: Any  # the first row
    passed: Any  # so many to advance
    run: Any  # so many to walk back, behind those
    slot: Any  # for the state before the run
    first: Any  # that slot, less so many: where a state before the first step would be


class BinomialState(NamedTuple):
    """The state of a running reverse sweep."""

    state: list[Any]  # before the last segment that has not been walked back
    slot: Any  # of this segment, where the state may be stored; slots before it are in use, others free
    segment: Any  # read before others are written: XLA would copy all of them on a CPU. None: a turn reads it
    end: Any  # the step behind the segment
    store: Store
    progress: LoopState  # the backward walk


def sweep_slots(track: Track, bodies: Bodies, checkpoint_rows: Any, saved: list[Any], progress: LoopState) -> LoopState:
    """Walk back through all steps."""
    store, used = Store.of(bodies.sweep, track, checkpoint_rows, saved)
    asks = bool(calibration().look)  # the host does; then a turn reads its segment where kernels need it
    evaluated_again = _in_one_loop if bodies.in_one_loop else _in_two_loops

    # A turn begins with a free slot: where there is none, one step remains, which the turn before walks back. So the
    # state may be stored in any case.
    def one_turn(at: BinomialState) -> BinomialState:
        state, slot, segment, end, store, progress = at
        step, division = in_segment(store.segment(slot) if segment is None else segment)
        free, remain = store.num_slots - slot, end - step
        divides = (remain > free + 1) & ~division.is_too_low(remain, free)
        distance, passed, ahead = division.divided(jnp.maximum(remain, 2), free)
        rest = jax.tree.map(partial(jnp.where, divides), passed, division.raised(free))
        store = store.put(slot, state, (step, rest), (step + distance, ahead))
        if calibration().platform == "gpu":  # a TPU would copy what each step reads
            slots, state = stored_first(store.slots, state)
            store = store._replace(slots=slots)
        # The current state is now that before `middle`. A number that is both a result and an operand of others would
        # have a kernel of its own: two numbers that loops are given are computed once more, from others.
        distance, one = (jnp.where(divides, number, 0) for number in (distance, jnp.ones_like(slot)))
        first = slot - jnp.where(divides, distance - 1, 0)  # the new slot - distance
        middle, remain, slot, free = step + distance, remain - distance, slot + one, free - one
        is_run = remain <= free + 1
        turn = Turn(track.row(step), distance, jnp.where(is_run, remain, 0), slot, first)
        state, last, slots = evaluated_again(track, bodies, store, turn, state)
        store = store._replace(slots=slots)

        # Walk the run backward, from what the last step would have stored. A step also reads what the step before it
        # needs: for the first step of the run, that is what stands in the slot before it.
        def take(body: Run, row: Any, position: Any, values: list[Any]) -> tuple[list[Any], list[Any]]:
            carry, y = bodies.back(body, row, values[num_stored:], values[:num_stored])
            before = store.place(slot + turn.run - 2 - position)  # -1 after the very last step: anything will do then
            return [*(read(slots[place], before) for place in bodies.places), *carry], y

        back = track.ahead._replace(reverse=not track.ahead.reverse)
        num_stored, steps = len(last), Steps(bodies.backward, take, back, track.row(end - 1))
        start = LoopState([*last, *progress.carry], progress.ys, jnp.int32(0))
        walk = RowLoop(reverse=False, unroll=track.ahead.unroll, length_known=False)
        walked = walk.run(steps, start, turn.run, begins=remain - free < 2)  # if it is a run
        before, end = jnp.maximum(slot - 1, 0), jnp.where(is_run, middle, end)
        if bodies.records:
            state = [where(is_run, popped, x) for popped, x in zip(store.state(before), state, strict=True)]
        else:  # it has been read, or nothing has been walked back
            state = walked.carry[:num_stored]
        progress = walked._replace(carry=walked.carry[num_stored:])
        slot = jnp.where(is_run, before, slot)
        return BinomialState(state, slot, None if asks else store.segment(slot), end, store, progress)

    last = jnp.maximum(used - 1, 0)
    start = BinomialState(
        store.state(last), last, None if asks else store.segment(last), track.num_steps, store, progress
    )
    return while_asked(lambda at: at.end > 0, one_turn, start).progress


# What is evaluated again in a turn, from the state before its first step. Results are the state before the last step
# of the run, or after it where records are stored, what this step would have stored, and the slots.
Again = tuple[list[Any], list[Any], list[Any]]


def _in_two_loops(track: Track, bodies: Bodies, store: Store, turn: Turn, state: list[Any]) -> Again:
    """One advances, and one stores what all steps of a run but the last one do."""
    run_start, slots = track.ahead.advance(turn.start, turn.passed), list(store.slots)
    take = lambda body, row, _, state: (bodies.step(body, row, state)[0], [])  # noqa: E731
    steps = Steps(bodies.forward, take, track.ahead, turn.start)
    walk = RowLoop(reverse=False, unroll=track.ahead.unroll, length_known=False)
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
        slot = turn.first + position
        place, stores = store.place(slot), (turn.slot <= slot) & (slot < turn.slot + turn.run - 1)
        for leaf, value in zip(bodies.places, stored, strict=True):
            slots[leaf] = put(slots[leaf], place, stores, value)
        return [*state, *stored, *slots], []

    # The state before the last step of a run is current when it is needed; the record of the last step is not.
    length = turn.passed + (turn.run if bodies.records else jnp.maximum(turn.run - 1, 0))
    start = LoopState([*state, *map(zeros, bodies.stored_avals), *store.slots], [], jnp.int32(0))
    steps = Steps(bodies.replay, take, track.ahead, turn.start)
    walk = RowLoop(reverse=False, unroll=track.ahead.unroll, length_known=False)
    carry = walk.run(steps, start, length).carry
    state, last, slots = split_list(carry, sizes)
    return state, last if bodies.records else state, slots
