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
from loopax._src.core.batching.groups import active_first, in_groups, put_back, run_function, take
from loopax._src.core.batching.lockstep import (
    LaneOperands,
    goes_on,
    hull,
    lane_function,
    result_axes,
    run_lanes,
    steps_of_each,
)
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lane_choice import OneStage
from loopax._src.core.ir.lanes import (
    CPU_LANES,
    REFILL_AT,
    Compact,
    Lockstep,
    Stage,
    fewest_lanes,
    group_sizes,
    stages,
)
from loopax._src.core.ir.loop import EMPTY_SLOT, Loop, deciding_operands, run
from loopax._src.core.ir.plan import EveryResidual
from loopax._src.core.jaxpr.cost import step_cost
from loopax._src.core.jaxpr.dependence import dependence
from loopax._src.core.jaxpr.types import Axis
from loopax._src.core.jaxpr.util import (
    INDEX,
    Mask,
    flatten,
    map_leaves,
    num_bytes,
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


def is_one_batch(loop: Loop, lanes: int, mapped: Mask) -> bool:
    """Whether so many lanes are too few for stages or groups, and run in lockstep."""
    assert isinstance(loop.lanes, Compact)
    if isinstance(loop.lanes, OneStage):
        return True
    if takes_one_step(loop):
        return False
    if not loop.predicated:
        return len(group_sizes(loop.lanes, lanes)) == 1
    return _stages(loop, mapped, lanes) == [Stage(lanes, 0)]


def _run(loop: Loop, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """The program of a batch; operands are `low, high, *consts, *carry, *xs`."""
    assert isinstance(loop.lanes, Compact)
    if isinstance(loop.lanes, OneStage):
        run_apart = _in_one_stage
    elif takes_one_step(loop) and axis.size:
        run_apart = _in_batches
    else:
        run_apart = _in_stages if loop.predicated else _in_groups
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


def _in_one_stage(loop: Loop, _: Compact, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Lanes that wait for each other."""
    low, high, lanes = _lanes(loop, mapped, operands)
    out, num_steps = run_lanes(loop._replace(saving=None, saved=()), axis, *hull(low, high), lanes)
    num_steps = steps_of_each(low, high, axis) if num_steps is None else num_steps
    return [num_steps, *out.carry, *out.ys]


def _in_groups(loop: Loop, how: Compact, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Lanes whose limits are all that stops them."""
    low, high = operands[:2]
    num_steps = steps_of_each(low, high, axis)
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


# Lanes whose predicates stop them: which go on is known only then.
#
# A stage is a batch of some places. Lanes are taken to these places, walk until few enough are left, and are put back:
# the results of all lanes stay where they are. Nothing is stored: reverse mode walks forward again, in groups
# (`core/batching/compact_autodiff.py`).


def _stages(loop: Loop, mapped: Mask, lanes: int) -> list[Stage]:
    """The stages of a batch; `mapped` says which of `low, high, *consts, *carry, *xs` have lanes."""
    assert isinstance(loop.lanes, Compact)
    cost = step_cost(loop.body, loop.num_consts)
    # Lanes in places that are refilled are at different rows, so they may not read any, nor have limits of their own.
    reads_rows = loop.input_avals.xs or loop.output_avals.ys or any(inputs & 1 for inputs in dependence(loop.body))
    if reads_rows or any(mapped[:2]) or loop.reporting or loop.body.effects:
        return stages(loop.lanes, lanes, cost.shrink)
    moved = num_bytes(select(mapped[2:], loop.body.in_avals[1:]))
    return stages(loop.lanes, lanes, cost.shrink, partial(cost.places, moved))


class _Batch(NamedTuple):
    """What the stages of a batch share."""

    loop: Loop
    axis: Axis  # of all lanes
    lanes: LaneOperands  # of all of them, at their start

    def take(self, carry: list[Any], numbers: Any) -> LaneOperands:
        """The operands of these lanes, with the carry that they have now."""
        lanes, axes = self.lanes, self.loop.inputs(LOOPS.operand_axes(self.loop)[2:])
        inputs = lanes.inputs._replace(carry=carry)
        if len(numbers) == self.axis.size:
            return lanes._replace(inputs=inputs)
        own = [take(x, 0, numbers) for x in lanes.own]
        inputs = map_leaves(lambda x, own, at: take(x, at, numbers) if own else x, inputs, lanes.mapped, axes)
        return lanes._replace(own=own, inputs=inputs)


class _LaneResults(NamedTuple):
    """Of all lanes of a batch, as far as they have walked."""

    num_steps: Any  # int32[lanes]
    carry: list[Any]  # [lanes, ...]
    ys: list[Any]  # [rows, lanes, ...]


def _in_stages(loop: Loop, _: Compact, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Lanes whose predicates stop them."""
    low, high, lanes = _lanes(loop, mapped, operands)
    low, high = hull(low, high)
    plan = _stages(loop, mapped, axis.size)
    reporting = loop.reporting and loop.reporting._replace(runs=len(plan))
    loop = loop._replace(saving=None, saved=(), reporting=reporting, inverse=None)
    found = _LaneResults(jnp.zeros(axis.size, jnp.int32), list(lanes.inputs.carry), [])
    # The lanes that are left, each of which walks at most all rows from its start on.
    numbers, limit = jnp.arange(axis.size, dtype=jnp.int32), high - low
    going = found.carry[0] & (low < high)
    for stage in plan:
        batch = _Batch(loop, axis, lanes)
        if stage.places < len(numbers):
            found, numbers = _refilled(batch, stage, limit, found, numbers, going)
            # These lanes are at different rows, of which none is read: they walk on as from the first one.
            loop, low, high = loop._replace(reverse=False), jnp.int32(0), limit
            if loop.bound is not None:
                lanes = lanes._replace(has_limits=(False, True), own=[limit - found.num_steps])
        else:
            leave = [jnp.int32(stage.leave)] if stage.leave else []
            found, going, (low, high) = _walked(batch, (low, high), leave, found, numbers)
            # Before: lanes in the places of this stage -> After: those that go on, without the others
            order = active_first(going)[: stage.leave]
            numbers, going = take(numbers, 0, order), take(going, 0, order)
    return [found.num_steps, *found.carry, *found.ys]


def _walked(
    batch: _Batch, rows: tuple[Any, Any], leave: Sequence[Any], found: _LaneResults, numbers: Any, going: Any = None
) -> tuple[_LaneResults, Any, tuple[Any, Any]]:
    """Walk with these lanes until no more than `leave` go on; also which go on, and the rows that are left.

    `going`: which do at the start, if their carry does not say so.
    """
    (low, high), loop, is_part = rows, batch.loop, len(numbers) < batch.axis.size
    lanes = batch.take(found.carry, numbers)
    predicates, walking = lanes.inputs.carry[0], going
    if walking is not None:
        lanes = lanes._replace(inputs=lanes.inputs._replace(carry=[walking, *lanes.inputs.carry[1:]]))
    out, num_steps = run_lanes(loop, batch.axis.resized(len(numbers)), low, high, lanes, *leave)
    # Before: the rows that are left -> After: those that these lanes have walked, and the rest
    reached = high - out.num_steps if loop.reverse else low + out.num_steps
    walked, rest = ((reached, high), (low, reached)) if loop.reverse else ((low, reached), (reached, high))
    first = rest[1] - 1 if loop.reverse else rest[0]
    ahead = goes_on(first, lanes.own, lanes.has_limits, loop.reverse)
    going = out.carry[0] & ahead & loop.is_before_stop(first, out.carry)
    if not is_part:
        return _LaneResults(num_steps, list(out.carry), list(out.ys)), going, rest
    every_row = jnp.arange(loop.bound or 0, dtype=jnp.int32)
    is_walked = (walked[0] <= every_row) & (every_row < walked[1])
    ys = [pick(is_walked, new, take(old, 1, numbers)) for new, old in zip(out.ys, found.ys, strict=True)]
    carry = list(out.carry)
    if walking is not None:  # those that do not walk would perhaps go on, but have taken all of their steps
        carry[0] = jnp.where(walking, carry[0], predicates)
    new = _LaneResults(num_steps + take(found.num_steps, 0, numbers), carry, ys)
    axes = _LaneResults(0, [0] * len(new.carry), [1] * len(ys))
    return jax.tree.map(partial(put_back, order=numbers), found, axes, new), going, rest


def _refilled(
    batch: _Batch, stage: Stage, limit: Any, found: _LaneResults, waiting: Any, going: Any
) -> tuple[_LaneResults, Any]:
    """A stage for some of the lanes that wait, and then for others; also which lanes it leaves.

    All take at most `limit` steps, from their start on. Which of those that wait go on is said in `going`.
    """
    batch, place = batch._replace(loop=batch.loop._replace(reverse=False)), jnp.arange(stage.places, dtype=jnp.int32)
    waiting, count = take(waiting, 0, active_first(going)), jnp.sum(going, dtype=jnp.int32)
    is_limited = batch.loop.bound is not None

    def turn(_: Any, __: Any, here: Any, taken: Any, numbers: Any, num_steps: Any, *carry: Any) -> list[Any]:
        # Of the lanes that wait, `taken` have got a place, and `here` of the places have lanes that go on.
        going, high = place < here, limit
        if is_limited:  # until the first of these lanes has taken all of its steps
            high = limit - jnp.max(jnp.where(going, take(num_steps, 0, numbers), 0))
        leave = jnp.where(taken < count, int(stage.places * REFILL_AT), stage.leave).astype(jnp.int32)
        found = _LaneResults(num_steps, list(carry), [])
        found, going, _ = _walked(batch, (jnp.int32(0), high), [leave], found, numbers, going)
        if is_limited:
            going = going & (take(found.num_steps, 0, numbers) < limit)
        # Before: places of lanes, some of which have finished -> After: those that go on, new ones, and others
        here = jnp.sum(going, dtype=jnp.int32)
        until = jnp.minimum(taken + stage.places - here, count)
        new, numbers = waiting.at[taken + place - here].get(mode="clip"), take(numbers, 0, active_first(going))
        numbers = jnp.where((here <= place) & (place < here + until - taken), new, numbers)
        here = here + until - taken
        return [count - until + here > stage.leave, here, until, numbers, found.num_steps, *found.carry]

    here = jnp.minimum(count, stage.places)
    state = [count > stage.leave, here, here, waiting[: stage.places], found.num_steps, *found.carry]
    kind = Decided(EveryResidual(reason="a stage of lanes"))
    _, _, _, numbers, num_steps, *carry = run_function(turn, state, bound=None, predicated=True, kind=kind).carry
    return _LaneResults(num_steps, carry, []), numbers[: stage.leave]


LOOPS = BatchRules(
    run=_run,
    operand_axes=lambda loop: [0] * (1 + loop.carry_range.stop) + [1] * len(loop.input_avals.xs),
    result_axes=lambda loop: result_axes(loop, 0, 0).leaves,
    steps_differ=lambda loop, mapped: any(mapped[i] for i in deciding_operands(loop)),
)
