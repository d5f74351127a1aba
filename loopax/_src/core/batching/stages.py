"""A batch of loops that does not wait for its slowest lane.

Lanes whose numbers of steps are known at the start are sorted into groups of lanes that take similar numbers, and one
group runs after another, each until its own slowest lane is done. Else a batch runs until few enough lanes are left;
those are gathered into a smaller batch, which goes on; in the end results are put back in their places. Lanes that take
one step or none run in batches of those that take it (`in_batches`).

Every group and every stage is a batch in lockstep.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.batching.compact import BatchRules
from loopax._src.core.batching.groups import GroupProgram, active_first, in_groups, take, take_mapped, with_rows
from loopax._src.core.batching.lockstep import (
    LaneOperands,
    goes_on,
    hull,
    lane_function,
    own_limits,
    result_axes,
    run_lanes,
)
from loopax._src.core.ir.lanes import Compact, Lockstep, fewest_in_group, group_sizes, stage_sizes
from loopax._src.core.ir.loop import EMPTY_SLOT, Loop, LoopInputs, Outcome, run
from loopax._src.core.jaxpr.cost import step_cost
from loopax._src.core.jaxpr.dependence import dependence_fixpoint
from loopax._src.core.jaxpr.types import Axis
from loopax._src.core.jaxpr.util import INDEX, Mask, collective_over, flatten, select, split_list, stacked, trace
from loopax._src.core.row_buffers import get, put
from loopax._src.jax_internals import keep_bits, zeros
from loopax._src.messages import collective_message

# Lanes of a loop of one step or none (a branch), in batches of those that take the step.
#
# The lanes that take it are counted when the program runs: batches of a fixed size are filled with them, one after
# another, as many as it takes. Each batch reads its lanes from the operands of all lanes, and writes their results to
# those of all lanes. It reads and writes in place, forward and backward, so lanes that do not take the step cost
# nothing. The places that are left over in the last batch repeat its first lane, and write nothing.


_MOST_BATCHES = 64


def takes_one_step(loop: Loop) -> bool:
    """Whether lanes of this loop can run in such batches."""
    return loop.bound == 1 and not loop.predicated and loop.reporting is None and loop.inverse is None


def in_batches(loop: Loop, axis: Axis, takes: Any, lanes: LaneOperands) -> Outcome:
    """The results of all lanes; takes: bool[lanes]."""
    assert isinstance(loop.lanes, Compact)
    if collective_over(loop.body, axis.name):
        raise NotImplementedError(collective_message(axis.name))
    size = min(max(fewest_in_group(loop.lanes), axis.size // _MOST_BATCHES), axis.size)
    batches = -(-axis.size // size)
    order = jnp.pad(_taking_first(takes), (0, batches * size - axis.size))
    count = jnp.sum(takes, dtype=jnp.int32)
    consts, carry, xs = lanes.inputs
    given = LoopInputs(consts, carry, [keep_bits(lambda x: x[0], x) for x in xs])
    ys = [zeros(stacked(aval, axis.size)) for aval in loop.output_avals.ys]
    batched = loop._replace(
        body=_body_of_batch(loop, axis, size, lanes.mapped, given, [*carry, *ys]),
        num_consts=2 + sum(map(len, given)),
        num_carry=len(carry) + len(ys),
        bound=batches,
        reverse=False,
        saving=None,
        saved=(),
        lanes=Lockstep(),
        debug_info=None,
    )
    num_batches = -(-count // size)
    out = run(batched, jnp.int32(0), num_batches, [order, count, *flatten(given)], [*carry, *ys], [])
    carry, ys = split_list(out.carry, [len(carry)])
    return Outcome(takes.astype(jnp.int32), carry, [y[None] for y in ys], [], [])


def _taking_first(takes: Any) -> Any:
    """The numbers of the lanes that take the step, in order; zeros behind them."""
    place = jnp.cumsum(takes, dtype=jnp.int32) - 1
    lanes = jnp.arange(len(takes), dtype=jnp.int32)
    place = jnp.where(takes, place, len(takes))
    return jnp.zeros_like(lanes).at[place].set(lanes, mode="drop", unique_indices=True)


def _body_of_batch(
    loop: Loop, axis: Axis, size: int, mapped: LoopInputs, given: LoopInputs, results: Sequence[Any]
) -> Any:
    """(number of the batch, order, count, *operands of all lanes, *results of all lanes) -> the results."""
    is_mapped = flatten(mapped)
    function = lane_function(loop.body, is_mapped, axis.resized(size).arguments)

    def body(number: Any, order: Any, count: Any, *operands: Any) -> list[Any]:
        of_lanes, results = split_list(operands, [len(is_mapped)])
        chosen = lax.dynamic_slice(order, (number * size,), (size,))
        is_lane = number * size + jnp.arange(size, dtype=jnp.int32) < count
        reads, writes = jnp.where(is_lane, chosen, chosen[0]), jnp.where(is_lane, chosen, axis.size)
        own = [get(x, reads)[0] if m else x for x, m in zip(of_lanes, is_mapped, strict=True)]
        out = function(is_lane, jnp.zeros((), INDEX.dtype), *own)
        return [put(rows, writes, new) for rows, new in zip(results, out, strict=True)]

    avals = [jax.ShapeDtypeStruct(order_shape, INDEX.dtype) for order_shape in ((-(-axis.size // size) * size,), ())]
    return trace(body, [INDEX, *avals, *map(jax.typeof, flatten(given)), *map(jax.typeof, results)])


def is_one_batch(loop: Loop, lanes: int) -> bool:
    """Whether so many lanes are too few for stages or groups, and run in lockstep."""
    assert isinstance(loop.lanes, Compact)
    if takes_one_step(loop):
        return False
    return len(_sizes(loop, loop.lanes, lanes) if loop.predicated else group_sizes(loop.lanes, lanes)) == 1


def _sizes(loop: Loop, how: Compact, lanes: int) -> list[int]:
    return stage_sizes(how, lanes, is_cheap=step_cost(loop.body, loop.num_consts).is_cheap)


class Results(NamedTuple):
    """Of all lanes of a batch."""

    num_steps: Any
    carry: list[Any]
    ys: list[Any]

    def take(self, order: Any) -> "Results":
        """These lanes, in this order."""
        carry, ys = [take(x, order, 0) for x in self.carry], [take(y, order, 1) for y in self.ys]
        return Results(take(self.num_steps, order, 0), carry, ys)

    def part(self, start: int, end: int) -> "Results":
        """Some lanes."""
        return Results(
            self.num_steps[start:end], [x[start:end] for x in self.carry], [y[:, start:end] for y in self.ys]
        )


def _run(loop: Loop, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """The program of a batch."""
    assert isinstance(loop.lanes, Compact)
    low, high, lanes = _lanes(loop, mapped, operands)
    if takes_one_step(loop) and axis.size:
        out = in_batches(loop, axis, jnp.broadcast_to(low < high, (axis.size,)), lanes)
        return [*out.leaves, *nothing_saved(loop, axis)]
    if loop.predicated:
        results = _in_stages(loop, loop.lanes, axis, *hull(low, high), lanes)
    else:
        results = _in_groups(loop, loop.lanes, axis, mapped, operands)
    return [results.num_steps, *results.carry, *results.ys, *nothing_saved(loop, axis)]


def _lanes(loop: Loop, mapped: Mask, operands: Sequence[Any]) -> tuple[Any, Any, LaneOperands]:
    low, high, *leaves = operands
    windows, own = mapped[:2], own_limits(mapped[:2], low, high)
    inputs = loop.inputs(mapped[2:])._replace(carry=(True,) * loop.num_carry)
    return low, high, LaneOperands(windows, own, inputs, loop.inputs(leaves))


def nothing_saved(loop: Loop, axis: Axis) -> list[Any]:
    """What a loop saves is for a sweep, and a batch of sweeps saves anew (`core/batching/compact.py`)."""
    if not loop.saving:
        return []
    avals = [stacked(aval, axis.size) for aval in select(loop.saved_mask, loop.output_avals.carry)]
    checkpoint_rows = jnp.full((axis.size, loop.saving.num_checkpoint_rows()), EMPTY_SLOT, jnp.int32)
    return [*(zeros(stacked(aval, loop.saved_rows)) for aval in avals), checkpoint_rows]


def _in_groups(loop: Loop, how: Compact, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> Results:
    """Lanes whose windows are all that stops them."""
    low, high, _ = _lanes(loop, mapped, operands)
    num_steps = jnp.broadcast_to(jnp.maximum(high - low, 0), (axis.size,))
    groups = sum(number for number, _ in group_sizes(how, axis.size))
    reporting = loop.reporting and loop.reporting._replace(runs=groups, lanes=axis.size)
    loop = loop._replace(saving=None, saved=(), reporting=reporting)

    def run_group(lanes: int, operands: Sequence[Any]) -> list[Any]:
        part = loop._replace(
            share=loop.share * lanes / max(axis.size, 1),
            reporting=loop.reporting and loop.reporting._replace(size=lanes),
        )
        carry, ys = _in_lockstep(part, axis.resized(lanes, similar=lanes < axis.size), mapped, operands)
        return [*carry, *ys]

    operand_axes = [at if has_lanes else None for at, has_lanes in zip(_operand_axes(loop), mapped, strict=True)]
    program = GroupProgram(run_group, operand_axes, _result_axes(loop)[1:])
    results = in_groups(program, how, num_steps, operands)
    return Results(num_steps, *split_list(results, [loop.num_carry]))


def _in_lockstep(loop: Loop, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    low, high, lanes = _lanes(loop, mapped, operands)
    out, _ = run_lanes(loop, axis, *hull(low, high), lanes)
    return out.carry, out.ys


def _in_stages(loop: Loop, how: Compact, axis: Axis, low: Any, high: Any, lanes: LaneOperands) -> Results:
    """Lanes whose predicates stop them: which go on is known only then.

    Nothing is stored: reverse mode walks forward again, in groups (`core/batching/compact_autodiff.py`).
    """
    sizes = _sizes(loop, how, axis.size)
    reporting = loop.reporting and loop.reporting._replace(runs=len(sizes))
    loop = loop._replace(saving=None, saved=(), reporting=reporting, inverse=None)
    places = jnp.arange(axis.size, dtype=jnp.int32)
    left = Results(jnp.int32(0), list(lanes.inputs.carry), [])
    finished = []
    for index, (size, smaller) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True)):
        out, num_steps = run_lanes(loop, axis.resized(size), low, high, lanes, leave=smaller)
        reached = high - out.num_steps if loop.reverse else low + out.num_steps
        walked, rest = ((reached, high), (low, reached)) if loop.reverse else ((low, reached), (reached, high))
        ys = [with_rows(old, new, *walked) for old, new in zip(left.ys, out.ys, strict=True)] if index else out.ys
        left = Results(left.num_steps + num_steps, out.carry, ys)
        low, high = rest
        if smaller:
            first = high - 1 if loop.reverse else low
            order = active_first(out.carry[0] & goes_on(first, lanes.own, lanes.windows, loop.reverse))
            left, places = left.take(order), take(places, order, 0)
            finished.append((left.part(smaller, size), places[smaller:]))
            left, places = left.part(0, smaller), places[:smaller]
            lanes = _lanes_left(lanes, order[:smaller], left.carry)
    return _in_place([(left, places), *reversed(finished)])


def _lanes_left(lanes: LaneOperands, order: Any, carry: list[Any]) -> LaneOperands:
    """The operands of the lanes that are left."""
    inputs = LoopInputs(
        take_mapped(lanes.inputs.consts, lanes.mapped.consts, order, 0),
        carry,
        take_mapped(lanes.inputs.xs, lanes.mapped.xs, order, 1),
    )
    return lanes._replace(own=[take(x, order, 0) for x in lanes.own], inputs=inputs)


def _in_place(parts: Sequence[tuple[Results, Any]]) -> Results:
    """The results of all lanes, each where it was at the start."""
    if len(parts) == 1:
        return parts[0][0]
    results, places = zip(*parts, strict=True)
    back = jnp.argsort(jnp.concatenate(places)).astype(jnp.int32)
    joined = Results(
        jnp.concatenate([r.num_steps for r in results]),
        [jnp.concatenate(leaves) for leaves in zip(*(r.carry for r in results), strict=True)],
        [jnp.concatenate(rows, 1) for rows in zip(*(r.ys for r in results), strict=True)],
    )
    return joined.take(back)


def _operand_axes(loop: Loop) -> list[int]:
    """Where operands have their lanes."""
    return [0, 0, *(0,) * (loop.num_consts + loop.num_carry), *(1 for _ in loop.input_avals.xs)]


def _result_axes(loop: Loop) -> list[int]:
    """Where results have their lanes. Each lane has checkpoint rows of its own."""
    return result_axes(loop, 0, 0).leaves


def _steps_differ(loop: Loop, mapped: Mask) -> bool:
    return any(mapped[:2]) or (
        loop.predicated and dependence_fixpoint(loop.body, (False, *mapped[2:]), loop.carry_range)[0]
    )


LOOPS = BatchRules(_run, _operand_axes, _result_axes, _steps_differ)
