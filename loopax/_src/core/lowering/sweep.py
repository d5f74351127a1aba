"""How a reverse sweep is compiled."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import schedule
from loopax._src.core.buffer_versions import returned
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.loop import EMPTY_SLOT, Loop, traversal
from loopax._src.core.ir.plan import Blocks
from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepOperands
from loopax._src.core.jaxpr.dependence import step_limits
from loopax._src.core.jaxpr.types import unvarying
from loopax._src.core.jaxpr.util import split_list, stacked, trace, weakly_cached
from loopax._src.core.lowering.loop import evaluate_loop
from loopax._src.core.lowering.rows import LoopState, RowLoop, Steps, read, while_asked, write
from loopax._src.core.lowering.sweep_bodies import Bodies, Run, Track, bodies_of, in_two_parts, recording_of
from loopax._src.core.lowering.sweep_slots import Store, in_segment, sweep_slots, with_one_more
from loopax._src.jax_internals import (
    ClosedJaxpr,
    inner_jaxprs,
    is_scan,
    is_while,
    jaxpr_as_fun,
    num_equations,
    unwritten,
    unwritten_after,
    where,
    zeros,
)

# A reverse sweep by an inverse: `saved` holds the state after the last step, and each step back finds the one before.
#
# The walk back is a loop whose carry is that of the sweep and the state. Each step of it evaluates the inverse, and
# then what the sweep does with the state.


def sweep_inverse(sweep: ReverseSweep, track: Track, operands: SweepOperands) -> list[Any]:
    """Walk back through all steps; returns carry and ys."""
    last = track.row(track.num_steps)
    low, high = (last + 1, track.first_row + 1) if sweep.reverse else (track.first_row, last)
    loop = Loop(
        _step_back(sweep),
        num_consts=sweep.num_consts,
        num_carry=sweep.num_carry + sweep.num_state,
        predicated=False,
        kind=Decided(sweep.plan),
        **traversal(sweep),
    )
    loop = loop._replace(reverse=not sweep.reverse)
    leaves = [*operands.consts, *operands.carry, *(x[0] for x in operands.saved), *operands.xs]
    _, carry, start, ys = split_list(
        evaluate_loop(low, high, *leaves, **loop._asdict()), [1, sweep.num_carry, sweep.num_state]
    )
    drift, last_state = sweep.saving.drift, [x[0] for x in operands.saved]
    if drift is None:
        return [*carry, *ys]
    assert sweep.inverse is not None
    # What the inverse returns as it came, such as its tape, has not been walked back.
    kept = returned(sweep.inverse, sweep.state_range)
    ends = [given if keeps else end for keeps, given, end in zip(kept, operands.init, start, strict=True)]
    return drift(operands.init, ends, last_state, [*carry, *ys])


@weakly_cached
def _step_back(sweep: ReverseSweep) -> ClosedJaxpr:
    """(row, *consts, *carry, *state after, *x) -> (*carry, *state before, *y)."""
    inverse, backward = jaxpr_as_fun(sweep.inverse), jaxpr_as_fun(sweep.backward)
    avals = sweep.backward_avals

    def step(row: Any, *operands: Any) -> list[Any]:
        given = sweep.of_backward(operands)
        before = given._replace(state=inverse(row, *sweep.forward_inputs(given)))
        out = sweep.outputs(backward(row, *sweep.backward_inputs(before)))
        return [*out.carry, *before.state, *out.ys]

    return trace(step, [sweep.step.in_avals[0], *sweep.backward_inputs(avals)])


# A reverse sweep of a step with loops in it, compiled once for all that the sweep does with it.
#
# A sweep with slots holds the part of a step that walks forward three times: to go on, to store states, and for the
# derivative. With loops in loops, each level adds three copies of the innermost step to the program. Compiling them
# takes long, so a step that has loops stands in the program once. Each iteration evaluates one step, whatever the
# schedule needs it for::
#
#     if this is the last step that remains:  walk back over it, and go on from the last state that is stored
#     else:                                   perhaps store its state, and go on to the next step
#
# The schedules are those of `sweep_blocks` and `sweep_slots`: the same steps are evaluated, and the same states stored.
# An iteration writes a state in any case. Where none is to be stored, it is one that will be overwritten.


# Equations in the loops of a step, from which on it is large. With fewer, compiling them again is quick. Equations
# outside of loops do not count: XLA fuses them with what walks back, which makes several copies faster than one
# (docs/how-it-works.md).
LARGE_STEP = 100


def _in_loops(jaxpr: Any) -> int:
    """How many equations stand in loops."""
    total = 0
    for eqn in jaxpr.eqns:
        count = num_equations if is_scan(eqn) or is_while(eqn) or eqn.primitive in step_limits else _in_loops
        total += sum(map(count, inner_jaxprs(eqn)))
    return total


class BlockStack(NamedTuple):
    """The states at the start of all blocks, and those of the steps of the current block."""

    saved: list[Any]
    states: list[Any]
    start: Any  # the first step of the block
    step: Any  # of the last state of the block that is stored
    size: Any

    def pushed(self, state: list[Any], step: Any, _: Any) -> "BlockStack":
        """With the current state, which is the one before `step`."""
        place = step - self.start
        states = [write(s, place, value) for s, value in zip(self.states, state, strict=True)]
        return self._replace(states=states, step=step)

    def popped(self) -> tuple["BlockStack", list[Any], Any]:
        """Without the last state; and that state, and its step."""
        step = self.step - 1
        ends = step < self.start
        block = jnp.maximum(self.start // self.size - ends.astype(jnp.int32), 0)
        start = block * self.size
        place = jnp.maximum(step - self.start, 0)
        pairs = zip(self.saved, self.states, strict=True)
        state = [where(ends, read(saved, block), read(states, place)) for saved, states in pairs]
        step = jnp.where(ends, start, step)
        return self._replace(start=start, step=step), state, step


class SlotStack(NamedTuple):
    """States in slots; those before `top` are in use."""

    store: Store
    top: Any
    next_step: Any  # the state before it is to be stored
    division: schedule.Division  # of the steps from there on

    def pushed(self, state: list[Any], step: Any, remaining: Any) -> "SlotStack":
        """Perhaps with the current state; `remaining` steps are not walked back."""
        free = self.store.num_slots - self.top
        stores = (free > 0) & (step == self.next_step) & (remaining > 1)
        distance, passed, ahead = self.division.divided(jnp.maximum(remaining, 2), jnp.maximum(free, 1))
        store = self.store.put(self.top, state, (step, passed), stores=stores)
        division = jax.tree.map(partial(jnp.where, stores), ahead, self.division)
        top, next_step = self.top + stores.astype(jnp.int32), self.next_step + jnp.where(stores, distance, 0)
        return SlotStack(store, top, next_step, division)

    def popped(self) -> tuple["SlotStack", list[Any], Any]:
        """As of blocks."""
        top = jnp.maximum(self.top - 1, 0)
        step, division = in_segment(self.store.segment(top))
        return self._replace(top=top, next_step=step, division=division), self.store.state(top), step


def stack_of(sweep: ReverseSweep, track: Track, checkpoint_rows: Any, saved: list[Any]) -> BlockStack | SlotStack:
    """What the forward loop has saved; the state to begin with is on top."""
    if isinstance(sweep.saving, Blocks):
        size = jnp.int32(sweep.saving.size)
        blocks = (track.num_steps + (size - 1)) // size
        states = [unwritten(stacked(aval, sweep.saving.size)) for aval in sweep.forward_avals.state]
        return BlockStack(saved, states, blocks * size, blocks * size, size)
    store, used = Store.of(sweep, track, checkpoint_rows, saved)
    count = store.num_slots
    steps = store.segments[:-1, 0].astype(jnp.int32)
    ends = jnp.where(jnp.arange(1, count + 1, dtype=jnp.int32) == used, track.num_steps, jnp.roll(steps, -1))
    divisions = schedule.divisions(jnp.maximum(ends - steps, 0), jnp.arange(count, 0, -1, dtype=jnp.int32))
    store = store._replace(segments=with_one_more(steps, divisions))
    ones = jnp.ones((), jnp.uint32)
    return SlotStack(store, used, jnp.zeros_like(used), schedule.Division(ones, ones))


class LargeState(NamedTuple):
    """The state of a running sweep."""

    stack: BlockStack | SlotStack
    state: list[Any]
    step: Any  # before which the state is
    end: Any  # the step behind the last that is not walked back
    progress: LoopState  # the backward walk


def sweep_large(track: Track, bodies: Bodies, stack: BlockStack | SlotStack, progress: LoopState) -> LoopState:
    """Walk back through all steps."""

    def one_step(at: LargeState) -> LargeState:
        row, remaining = track.row(at.step), at.end - at.step
        is_last = remaining == 1
        stack = at.stack.pushed(at.state, at.step, remaining)
        state, record = bodies.step(bodies.replay.at(row).run, row, at.state)

        def back(carry: list[Any]) -> tuple[list[Any], list[Any]]:
            return bodies.back(bodies.backward.at(row).run, row, carry, record)

        def nothing(carry: list[Any]) -> tuple[list[Any], list[Any]]:
            return carry, [zeros(aval) for aval in bodies.sweep.y_avals]

        # Rows of zeros are overwritten when these steps are walked back.
        carry, y = lax.cond(is_last, back, nothing, at.progress.carry)
        ys = [write(buffer, row, value) for buffer, value in zip(at.progress.ys, y, strict=True)]

        def chosen(if_last: Any, otherwise: Any) -> Any:
            return otherwise if if_last is otherwise else where(is_last, if_last, otherwise)

        popped = stack.popped()
        stack, state, step = jax.tree.map(chosen, popped, (stack, state, at.step + 1))
        return LargeState(stack, state, step, at.end - is_last.astype(jnp.int32), progress._replace(carry=carry, ys=ys))

    stack, state, step = stack.popped()
    start = LargeState(stack, state, step, track.num_steps, progress)
    return while_asked(lambda at: at.end > 0, one_step, start).progress


# A reverse sweep over blocks: `saved` holds the state at the start of each.
#
# Block by block, from the last to the first, the steps of one block are evaluated again. What they store, their
# states or records of residuals, is then read on the way back.


class TwoLevelState(NamedTuple):
    """The state of a running reverse sweep."""

    walked: Any  # how many blocks: XLA knows the length of a loop that counts up, and not of one that counts down
    stored: list[Any]  # room for what the steps of one block store
    progress: LoopState  # the backward walk


def sweep_blocks(saving: Blocks, track: Track, bodies: Bodies, saved: list[Any], progress: LoopState) -> LoopState:
    """Walk back through all blocks."""
    size = saving.size

    def walked_back(at: TwoLevelState, block: Any, length: Any) -> TwoLevelState:
        start = track.row(block * size)
        state = [read(s, block) for s in saved]
        # Evaluate the steps of the block again, into `stored`; the last state needs no step after it.
        replay = bodies.replay_steps(track.ahead, start, written=lambda position: position)
        end = length if bodies.records else length - 1
        walk = RowLoop(reverse=False, unroll=track.ahead.unroll)
        replayed = walk.run(replay, LoopState(state, at.stored, jnp.int32(0)), end)
        stored = replayed.ys
        if not bodies.records:
            stored = [write(s, length - 1, value) for s, value in zip(stored, replayed.carry, strict=True)]

        def take(body: Run, row: Any, position: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
            return bodies.back(body, row, carry, [read(s, position) for s in stored])

        # Walk the block backward. Positions count from the block's start: XLA then has one number less to carry into
        # every fused operation, which decides whether a tiny loop is compiled as one function.
        steps, progress = Steps(bodies.backward, take, track.ahead, start), at.progress._replace(position=length - 1)
        progress = walk._replace(reverse=True).run(steps, progress, jnp.int32(-1))
        return TwoLevelState(at.walked + 1, stored, progress)

    # Where the loop is the first of two, the residuals of the other one are used up when its cotangents are there: the
    # blocks have their room (`core/autodiff/planning.py`).
    waits = [x for x in progress.carry if saving.record_bytes]
    stored = [unwritten_after(stacked(aval, size), waits) for aval in bodies.stored_avals]
    at = TwoLevelState(jnp.int32(0), stored, progress)
    whole = track.num_steps // size
    if saving.are_known and not saving.are_even:  # the last one has fewer steps, of which a compiler knows the number
        at = walked_back(at, whole, track.num_steps - whole * size)._replace(walked=jnp.int32(0))
    number = whole if saving.are_known else (track.num_steps + (size - 1)) // size

    def one_block(at: TwoLevelState) -> TwoLevelState:
        block = number - 1 - at.walked
        length = jnp.int32(size) if saving.are_known else jnp.minimum(track.num_steps - block * size, size)
        return walked_back(at, block, length)

    return lax.while_loop(lambda at: at.walked < number, one_block, at).progress


def evaluate_sweep(low: Any, high: Any, checkpoint_rows: Any, *operands: Any, **params: Any) -> list[Any]:
    """The meaning of `reverse_sweep_p` as a function of JAX, by which it is run and compiled.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`, results `*carry, *ys`. `init` is
    read only to check an inverse: elsewhere `saved` holds it too, as the first checkpoint.
    """
    sweep = ReverseSweep(**params)
    low, high, checkpoint_rows = map(unvarying, (low, high, checkpoint_rows))
    consts, init, saved, carry, xs = map(list, sweep.operands(operands))
    ys = [unwritten(stacked(aval, sweep.bound or 0)) for aval in sweep.y_avals]
    if sweep.bound == 0:  # there are no rows, and no checkpoints
        return [*carry, *ys]
    ahead, first_row = RowLoop(sweep.reverse, sweep.unroll), checkpoint_rows[0]
    num_steps = jnp.maximum(ahead.distance(first_row, low - 1 if sweep.reverse else high), 0)
    track = Track(first_row, jnp.where(first_row == EMPTY_SLOT, 0, num_steps), ahead)
    if sweep.inverse is not None:
        return sweep_inverse(sweep, track, SweepOperands(consts, init, saved, carry, xs))
    progress, recorded = LoopState(carry, ys, low), recording_of(sweep)
    if recorded is None and _in_loops(sweep.step) >= LARGE_STEP and (parts := in_two_parts(sweep, False)):
        bodies = bodies_of(sweep, consts, xs, parts)
        progress = sweep_large(track, bodies, stack_of(sweep, track, checkpoint_rows, saved), progress)
        return [*progress.carry, *progress.ys]
    bodies = bodies_of(sweep, consts, xs, recorded)
    if isinstance(sweep.saving, Blocks):
        progress = sweep_blocks(sweep.saving, track, bodies, saved, progress)
    else:
        progress = sweep_slots(track, bodies, checkpoint_rows, saved, progress)
    return [*progress.carry, *progress.ys]
