"""A reverse sweep of a step with loops in it, compiled once for all that the sweep does with it.

A sweep with slots holds the part of a step that walks forward three times: to go on, to store states, and for the
derivative. With loops in loops, each level adds three copies of the innermost step to the program. Compiling them takes
long, so a step that has loops stands in the program once. Each iteration evaluates one step, whatever the
schedule needs it for::

    if this is the last step that remains:  walk back over it, and go on from the last state that is stored
    else:                                   perhaps store its state, and go on to the next step

The schedules are those of `sweep_two_level.py` and `sweep_binomial.py`: the same steps are evaluated, and the same
states stored. An iteration writes a state in any case. Where none is to be stored, it is one that will be overwritten.
"""

from collections.abc import Sequence
from functools import singledispatch
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import schedule
from loopax._src.core.ir.loop import EMPTY_SLOT
from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.own_primitives import step_limits
from loopax._src.core.jaxpr.util import inner_jaxprs, num_equations, stacked
from loopax._src.core.lowering.sweep_common import Bodies, Track
from loopax._src.core.lowering.while_loop import LoopState, read, write
from loopax._src.jax_internals import is_scan, is_while, unwritten, where, zeros
from loopax._src.schedule.saving import Blocks, Saving, Slots

# Equations in the loops of a step, from which on it is large. With fewer, compiling them again is quick. Equations
# outside of loops do not count: XLA fuses them with what walks back, which makes several copies faster than one
# (docs/how-it-works.md).
LARGE_STEP = 100


def is_large(sweep: ReverseSweep) -> bool:
    """Whether compiling the step takes so long that the program should hold it once."""
    return _in_loops(sweep.step.jaxpr) >= LARGE_STEP


def _in_loops(jaxpr: Any) -> int:
    """How many equations stand in loops."""
    total = 0
    for eqn in jaxpr.eqns:
        count = num_equations if is_scan(eqn) or is_while(eqn) or eqn.primitive in step_limits else _in_loops
        total += sum(map(count, inner_jaxprs(eqn)))
    return total


class Stack(Protocol):
    """The states that are stored: a pytree, for it is a part of a loop's state."""

    def pushed(self, state: list[Any], step: Any, remaining: Any) -> "Stack":
        """Perhaps with the current state, which is the one before `step`; `remaining` steps are not walked back."""
        ...

    def popped(self) -> tuple["Stack", list[Any], Any]:
        """Without the last state; and that state, and its step."""
        ...


class BlockStack(NamedTuple):
    """The states at the start of all blocks, and those of the steps of the current block."""

    saved: list[Any]
    states: list[Any]
    start: Any  # the first step of the block
    step: Any  # of the last state of the block that is stored
    size: Any

    def pushed(self, state: list[Any], step: Any, remaining: Any) -> "BlockStack":
        """See `Stack.pushed`."""
        del remaining
        place = step - self.start
        states = [write(s, place, value) for s, value in zip(self.states, state, strict=True)]
        return self._replace(states=states, step=step)

    def popped(self) -> tuple["BlockStack", list[Any], Any]:
        """See `Stack.popped`."""
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
    """States in slots, and the step of each; those before `top` are in use."""

    slots: list[Any]
    steps: Any  # int32[slots]
    top: Any
    next_step: Any  # the state before it is to be stored

    def pushed(self, state: list[Any], step: Any, remaining: Any) -> "SlotStack":
        """See `Stack.pushed`."""
        count = self.steps.size
        has_room = self.top < count
        place = jnp.minimum(self.top, count - 1)

        def put(array: Any, value: Any) -> Any:
            return write(array, place, where(has_room, value, read(array, place)))

        slots = [put(s, value) for s, value in zip(self.slots, state, strict=True)]
        stores = has_room & (step == self.next_step) & (remaining > 1)
        distance = lax.cond(
            stores,
            lambda: schedule.advance(jnp.maximum(remaining, 2), jnp.maximum(count - self.top, 1)),
            lambda: jnp.zeros_like(self.next_step),
        )
        top = self.top + stores.astype(jnp.int32)
        return SlotStack(slots, put(self.steps, step), top, self.next_step + distance)

    def popped(self) -> tuple["SlotStack", list[Any], Any]:
        """See `Stack.popped`."""
        top = jnp.maximum(self.top - 1, 0)
        step = self.steps[top]
        return self._replace(top=top, next_step=step), [read(s, top) for s in self.slots], step


@singledispatch
def stack_of(saving: Saving, state_avals: Sequence[Any], track: Track, checkpoint_rows: Any, saved: list[Any]) -> Stack:
    """What the forward loop has saved; the state to begin with is on top."""
    raise NotImplementedError(type(saving))


@stack_of.register
def _stack_of_blocks(
    saving: Blocks, state_avals: Sequence[Any], track: Track, checkpoint_rows: Any, saved: list[Any]
) -> Stack:
    del checkpoint_rows
    size = jnp.int32(saving.size)
    blocks = (track.num_steps + (size - 1)) // size
    states = [unwritten(stacked(aval, saving.size)) for aval in state_avals]
    return BlockStack(saved, states, blocks * size, blocks * size, size)


@stack_of.register
def _stack_of_slots(
    saving: Slots, state_avals: Sequence[Any], track: Track, checkpoint_rows: Any, saved: list[Any]
) -> Stack:
    del saving, state_avals
    steps = jnp.where(checkpoint_rows == EMPTY_SLOT, 0, track.step(checkpoint_rows))
    used = jnp.sum(checkpoint_rows != EMPTY_SLOT, dtype=jnp.int32)
    return SlotStack(saved, steps, used, jnp.int32(0))


class LargeState(NamedTuple):
    """The state of a running sweep."""

    stack: Any
    state: list[Any]
    step: Any  # before which the state is
    end: Any  # the step behind the last that is not walked back
    progress: LoopState  # the backward walk


def sweep_large(track: Track, bodies: Bodies, y_avals: Sequence[Any], stack: Stack, progress: LoopState) -> LoopState:
    """Walk back through all steps."""
    forward, backward = bodies.replay, bodies.backward

    def one_step(at: LargeState) -> LargeState:
        row, remaining = track.row(at.step), at.end - at.step
        is_last = remaining == 1
        stack = at.stack.pushed(at.state, at.step, remaining)
        state, record = forward.once(row, at.state)

        def back(carry: list[Any]) -> tuple[list[Any], list[Any]]:
            return backward.once(row, carry, record)

        def nothing(carry: list[Any]) -> tuple[list[Any], list[Any]]:
            return carry, [zeros(aval) for aval in y_avals]

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
    return lax.while_loop(lambda at: at.end > 0, one_step, start).progress
