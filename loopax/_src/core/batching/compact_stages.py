"""A batch of loops that does not wait for its slowest lane.

Lanes whose numbers of steps are known at the start are sorted into groups of lanes that take similar numbers, and one
group runs after another, each until its own slowest lane is done. Else a batch runs until few enough lanes are left;
those are gathered into a smaller batch, which goes on; in the end results are put back in their places. Lanes that take
one step or none run in batches of those that take it (`_in_batches`).

Every group and every stage is a batch in lockstep.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.batching.compact_primitive import BatchRules
from loopax._src.core.batching.groups import active_first, in_groups, take
from loopax._src.core.batching.lockstep import LaneOperands, goes_on, hull, lane_function, result_axes, run_lanes
from loopax._src.core.ir.lanes import CPU_LANES, Compact, Lockstep, fewest_lanes, group_sizes, stage_sizes
from loopax._src.core.ir.loop import EMPTY_SLOT, Loop, run
from loopax._src.core.jaxpr.cost import step_cost
from loopax._src.core.jaxpr.dependence import dependence_fixpoint
from loopax._src.core.jaxpr.types import Axis
from loopax._src.core.jaxpr.util import (
    INDEX,
    Mask,
    flatten,
    map_leaves,
    refuse_collectives,
    select,
    split_list,
    stacked,
    trace,
)
from loopax._src.core.masking import pick
from loopax._src.core.row_buffers import get, put
from loopax._src.jax_internals import keep_bits, zeros

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


def _in_batches(loop: Loop, how: Compact, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Lanes that take one step or none."""
    refuse_collectives(loop.body, axis.name)
    low, high, lanes = _lanes(loop, mapped, operands)
    takes = jnp.broadcast_to(low < high, (axis.size,))
    size = min(max(fewest_lanes(how, CPU_LANES), axis.size // _MOST_BATCHES), axis.size)
    batches = -(-axis.size // size)
    # The numbers of the lanes that take the step, in order; zeros behind them.
    place = jnp.where(takes, jnp.cumsum(takes, dtype=jnp.int32) - 1, axis.size)
    numbers = jnp.arange(axis.size, dtype=jnp.int32)
    order = jnp.zeros_like(numbers).at[place].set(numbers, mode="drop", unique_indices=True)
    order = jnp.pad(order, (0, batches * size - axis.size))
    count = jnp.sum(takes, dtype=jnp.int32)
    consts, carry, xs = lanes.inputs
    given = [*consts, *carry, *(keep_bits(lambda x: x[0], x) for x in xs)]
    results = [*carry, *(zeros(stacked(aval, axis.size)) for aval in loop.output_avals.ys)]
    is_mapped = flatten(lanes.mapped)
    function = lane_function(loop.body, is_mapped, axis.resized(size).arguments)

    def body(number: Any, order: Any, count: Any, *operands: Any) -> list[Any]:
        # Before: [row, *consts, *carry, *x] of a lane -> [*carry, *y]
        # After: [number of the batch, order, count, *operands of all lanes, *results of all lanes] -> [*results]
        of_lanes, results = split_list(operands, [len(is_mapped)])
        chosen = lax.dynamic_slice(order, (number * size,), (size,))
        is_lane = number * size + jnp.arange(size, dtype=jnp.int32) < count
        reads, writes = jnp.where(is_lane, chosen, chosen[0]), jnp.where(is_lane, chosen, axis.size)
        own = [get(x, reads)[0] if m else x for x, m in zip(of_lanes, is_mapped, strict=True)]
        out = function(is_lane, jnp.zeros((), INDEX.dtype), *own)
        return [put(rows, writes, new) for rows, new in zip(results, out, strict=True)]

    batched = loop._replace(
        body=trace(body, [INDEX, *map(jax.typeof, (order, count, *given, *results))]),
        num_consts=2 + len(given),
        num_carry=len(results),
        bound=batches,
        reverse=False,
        saving=None,
        saved=(),
        lanes=Lockstep(),
        debug_info=None,
    )
    num_batches = -(-count // size)
    out = run(batched, jnp.int32(0), num_batches, [order, count, *given], results, [])
    carry, ys = split_list(out.carry, [len(carry)])
    return [takes.astype(jnp.int32), *carry, *(y[None] for y in ys)]


def is_one_batch(loop: Loop, lanes: int) -> bool:
    """Whether so many lanes are too few for stages or groups, and run in lockstep."""
    assert isinstance(loop.lanes, Compact)
    if takes_one_step(loop):
        return False
    if not loop.predicated:
        return len(group_sizes(loop.lanes, lanes)) == 1
    return len(stage_sizes(loop.lanes, lanes, step_cost(loop.body, loop.num_consts).is_cheap)) == 1


class _LaneResults(NamedTuple):
    """Of some lanes of a batch, or at which axis each has its lanes."""

    places: Any  # int32[lanes]: which lanes of the batch
    num_steps: Any  # int32[lanes]
    carry: list[Any]  # [lanes, ...]
    ys: list[Any]  # [rows, lanes, ...]


def _run(loop: Loop, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """The program of a batch; operands are `low, high, *consts, *carry, *xs`."""
    assert isinstance(loop.lanes, Compact)
    is_one_step = takes_one_step(loop) and axis.size
    run_apart = _in_batches if is_one_step else _in_stages if loop.predicated else _in_groups
    return [*run_apart(loop, loop.lanes, axis, mapped, operands), *nothing_saved(loop, axis)]


def _lanes(loop: Loop, mapped: Mask, operands: Sequence[Any]) -> tuple[Any, Any, LaneOperands]:
    low, high, *leaves = operands
    has_limits, own = mapped[:2], select(mapped[:2], (low, high))
    inputs = loop.inputs(mapped[2:])._replace(carry=(True,) * loop.num_carry)
    return low, high, LaneOperands(has_limits, own, inputs, loop.inputs(leaves))


def nothing_saved(loop: Loop, axis: Axis) -> list[Any]:
    """What a loop saves is for a sweep, and a batch of sweeps saves anew (`core/batching/compact_primitive.py`)."""
    if not loop.saving:
        return []
    avals = [stacked(aval, axis.size) for aval in select(loop.saved_mask, loop.output_avals.carry)]
    checkpoint_rows = jnp.full((axis.size, loop.saving.num_checkpoint_rows()), EMPTY_SLOT, jnp.int32)
    return [*(zeros(stacked(aval, loop.saved_rows)) for aval in avals), checkpoint_rows]


def _in_groups(loop: Loop, how: Compact, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Lanes whose limits are all that stops them."""
    low, high = operands[:2]
    num_steps = jnp.broadcast_to(jnp.maximum(high - low, 0), (axis.size,))
    groups = sum(number for number, _ in group_sizes(how, axis.size))
    reporting = loop.reporting and loop.reporting._replace(runs=groups, lanes=axis.size)
    loop = loop._replace(saving=None, saved=(), reporting=reporting)

    def run_group(size: int, operands: Sequence[Any]) -> list[Any]:
        low, high, lanes = _lanes(loop, mapped, operands)
        part = loop._replace(
            share=loop.share * size / max(axis.size, 1), reporting=loop.reporting and loop.reporting._replace(size=size)
        )
        out, _ = run_lanes(part, axis.resized(size, similar=size < axis.size), *hull(low, high), lanes)
        return [*out.carry, *out.ys]

    axes = [at if has_lanes else None for at, has_lanes in zip(LOOPS.operand_axes(loop), mapped, strict=True)]
    return [num_steps, *in_groups(run_group, how, num_steps, operands, axes, LOOPS.result_axes(loop)[1:])]


def _in_stages(loop: Loop, how: Compact, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Lanes whose predicates stop them: which go on is known only then.

    Nothing is stored: reverse mode walks forward again, in groups (`core/batching/compact_autodiff.py`).
    """
    low, high, lanes = _lanes(loop, mapped, operands)
    low, high = hull(low, high)
    sizes = stage_sizes(how, axis.size, step_cost(loop.body, loop.num_consts).is_cheap)
    reporting = loop.reporting and loop.reporting._replace(runs=len(sizes))
    loop = loop._replace(saving=None, saved=(), reporting=reporting, inverse=None)
    left = _LaneResults(jnp.arange(axis.size, dtype=jnp.int32), jnp.int32(0), list(lanes.inputs.carry), [])
    axes = _LaneResults(0, 0, [0] * loop.num_carry, [1] * len(loop.output_avals.ys))
    input_axes, finished = loop.inputs(LOOPS.operand_axes(loop)[2:]), []
    for index, (size, smaller) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True)):
        out, num_steps = run_lanes(loop, axis.resized(size), low, high, lanes, leave=smaller)
        # Before: the rows that are left -> After: those that this stage has walked, and the rest, for the next stage
        reached = high - out.num_steps if loop.reverse else low + out.num_steps
        walked, rest = ((reached, high), (low, reached)) if loop.reverse else ((low, reached), (reached, high))
        rows = jnp.arange(loop.bound or 0, dtype=jnp.int32)
        is_walked = (walked[0] <= rows) & (rows < walked[1])
        ys = [pick(is_walked, new, old) for new, old in zip(out.ys, left.ys, strict=True)] if index else out.ys
        left = _LaneResults(left.places, left.num_steps + num_steps, out.carry, ys)
        low, high = rest
        if not smaller:
            break
        # Before: lanes in the order of this stage -> After: those that go on, then those that are done
        first = high - 1 if loop.reverse else low
        order = active_first(out.carry[0] & goes_on(first, lanes.own, lanes.has_limits, loop.reverse))
        ordered = jax.tree.map(partial(take, order=order), left, axes)
        left, done = (
            jax.tree.map(lambda x, at, part=part: lax.slice_in_dim(x, *part, axis=at), ordered, axes)
            for part in ((0, smaller), (smaller, size))
        )
        finished.append(done)
        of_part = partial(take, order=order[:smaller])
        given = map_leaves(lambda x, own, at, f=of_part: f(x, at) if own else x, lanes.inputs, lanes.mapped, input_axes)
        lanes = lanes._replace(own=[of_part(x, 0) for x in lanes.own], inputs=given._replace(carry=left.carry))
    if finished:
        # Before: lanes of the last stage, then those that were done before it, the latest first
        # After: each lane where it was at the start
        parts = [left, *reversed(finished)]
        left = jax.tree.map(lambda at, *xs: jnp.concatenate(xs, at), axes, *parts)
        left = jax.tree.map(partial(take, order=jnp.argsort(left.places).astype(jnp.int32)), left, axes)
    return [left.num_steps, *left.carry, *left.ys]


LOOPS = BatchRules(
    run=_run,
    operand_axes=lambda loop: [0] * (1 + loop.carry_range.stop) + [1] * len(loop.input_avals.xs),
    result_axes=lambda loop: result_axes(loop, 0, 0).leaves,
    steps_differ=lambda loop, mapped: (
        any(mapped[:2])
        or (loop.predicated and dependence_fixpoint(loop.body, (False, *mapped[2:]), loop.carry_range)[0])
    ),
)
