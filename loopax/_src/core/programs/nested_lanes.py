"""Free lanes: a loop with one loop in its body as a single loop, in which lanes need not wait for each other.

In lockstep a batch of nested loops waits at every outer step for the lane with the most inner steps. Here one step of
the single loop is, for each lane, whatever that lane is at::

    if it is to begin an outer step:  what stands before the inner loop
    if the inner loop goes on:        one step of it
    if the inner loop has ended:      what stands after it; on to the next outer step

Each of the three is a loop of at most one step, which in a batch runs if any lane needs it, and in which the other
lanes are filled. So this is an ordinary loop to every transformation. (Dance et al. 2025, docs/references.md.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src.core.ir.loop import Loop, Outcome, run
from loopax._src.core.jaxpr.util import INDEX, MOST_STEPS, split_list, stacked, trace, weakly_cached
from loopax._src.core.jaxpr.varying_axes import settled
from loopax._src.core.lowering.while_loop import RowLoop, read
from loopax._src.core.programs.split_at_loop import LaneState, Stepper, at_most_once, split_at_loop, written
from loopax._src.jax_internals import replace_jaxpr, vary_like, zeros
from loopax._src.messages import FREE_NEEDS_BOUNDS, free_form_message, inverse_message


class NestedState(NamedTuple):
    """Where a lane is."""

    goes_on: Any  # it takes this outer step, or is in it
    inside: Any  # it has begun the outer step
    row: Any  # of the outer step
    num_steps: Any  # outer steps that are done
    carry: list[Any]
    ys: list[Any]
    inner: LaneState


class Machine(NamedTuple):
    """One step of a lane."""

    loop: Loop
    inner: Stepper
    low: Any
    high: Any
    consts: Sequence[Any]
    xs: Sequence[Any]

    def start(self, carry: Sequence[Any]) -> NestedState:
        """Before the first step."""
        row = RowLoop(self.loop.reverse).first(self.low, self.high)
        ys = [zeros(stacked(aval, self.loop.bound or 0)) for aval in self.loop.output_avals[1]]
        no = jnp.zeros((), bool)
        return NestedState(self.goes_on(row, carry), no, row, jnp.int32(0), list(carry), ys, self.inner.start())

    def goes_on(self, row: Any, carry: Sequence[Any]) -> Any:
        """Whether a lane takes an outer step at this row."""
        ahead = (self.low <= row) & (row < self.high)
        return ahead & carry[0] if self.loop.predicated else ahead

    def step(self, state: NestedState) -> NestedState:
        """Begin an outer step, take an inner step, end the outer one: whatever the lane is at."""

        def inputs() -> list[Any]:
            return [state.row, *self.consts, *state.carry, *(read(x, state.row) for x in self.xs)]

        begins = state.goes_on & ~state.inside
        inside = state.inside | begins
        at = self.inner.begin(begins, inputs, state.inner)
        at = self.inner.step(inside & self.inner.goes_on(at), inputs, at)
        ends = inside & ~self.inner.goes_on(at)
        values = [*state.carry, *map(zeros, self.loop.output_avals[1])]
        outputs = at_most_once(ends, lambda *_: self.inner.after(inputs(), at), values)
        carry, rows = map(list, self.loop.outputs(outputs))
        counted = ends.astype(jnp.int32)
        row = RowLoop(self.loop.reverse).advance(state.row, counted)
        ys = written(state.ys, state.row, rows, ends)
        return NestedState(self.goes_on(row, carry), inside & ~ends, row, state.num_steps + counted, carry, ys, at)


@weakly_cached
def _as_one(loop: Loop) -> tuple[Loop, Any]:
    """The single loop of states, its consts being low, high, *consts, *xs; and the structure of a state."""
    stepper = Stepper(split_at_loop(loop.body, _refuse))
    consts, carry, rows = loop.input_avals
    operands = [INDEX, INDEX, *consts, *(stacked(aval, loop.bound or 0) for aval in rows)]
    structure: list[Any] = []

    def start(low: Any, high: Any, *carry: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(Machine(loop, stepper, low, high, [], []).start(carry))
        structure.append(treedef)
        return leaves

    def step(_: Any, *values: Any) -> list[Any]:
        leaves, (low, high), own_consts, xs = split_list(values, [len(state), 2, len(consts)])
        now = Machine(loop, stepper, low, high, own_consts, xs).step(structure[0].unflatten(leaves))
        return jax.tree.leaves(now)

    state = trace(start, [INDEX, INDEX, *carry]).out_avals
    body = settled(step, INDEX, state, operands)
    row, leaves, given = split_list(body.jaxpr.invars, [1, len(state)])
    single = Loop(
        replace_jaxpr(body, [*row, *given, *leaves], body.jaxpr.outvars),
        num_consts=len(operands),
        num_carry=len(state),
        bound=_bound(loop, stepper.parts.loop),
        reverse=False,
        predicated=True,
        unroll=1,
        storage=loop.storage,
        reporting=loop.reporting,
        debug_info=loop.debug_info,
    )
    return single, structure[0]


def run_free(
    loop: Loop, low: Any, high: Any, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]
) -> Outcome:
    """Run the loop as a single one."""
    if loop.inverse is not None:
        raise NotImplementedError(inverse_message("lanes='free'"))
    stepper = Stepper(split_at_loop(loop.body, _refuse))
    if loop.bound == 0:
        return run(loop, low, high, consts, carry, xs)
    single, structure = _as_one(loop)
    if single.bound is None and loop.storage.needs_bound:
        raise ValueError(FREE_NEEDS_BOUNDS)
    start = jax.tree.leaves(Machine(loop, stepper, low, high, consts, xs).start(carry))
    start = list(map(vary_like, start, single.body.out_avals))
    end = jnp.int32(MOST_STEPS if single.bound is None else single.bound)
    out = run(single, jnp.int32(0), end, [low, high, *consts, *xs], start, [])
    last: NestedState = structure.unflatten(out.carry)
    return Outcome(last.num_steps, last.carry, last.ys, [], [])


def _refuse(loops: int) -> Exception:
    return ValueError(free_form_message(loops))


def _bound(loop: Loop, inner: Loop) -> int | None:
    """The most steps of the single loop."""
    if loop.bound is None or inner.bound is None:
        return None
    bound = loop.bound * max(inner.bound, 1)
    return bound if bound < MOST_STEPS else None
