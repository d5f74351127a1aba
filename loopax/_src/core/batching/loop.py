"""Batching: `jax.vmap` of loops.

Where all lanes take the same steps, the batch is one loop on larger arrays. Else it runs in lockstep
(`core/batching/lockstep_loop.py`) or in stages (`core/batching/compact/loop.py`).
"""

from collections.abc import Callable, Sequence
from operator import and_
from typing import Any

import jax.numpy as jnp

from loopax._src.core.batching.choice import chosen, kept_together
from loopax._src.core.batching.compact.loop import LOOPS
from loopax._src.core.batching.compact.primitive import compact_vmap
from loopax._src.core.batching.lockstep_loop import LaneOperands, own_limits, result_axes, run_lanes, takes_any_step
from loopax._src.core.batching.masked_step import any_row, hull
from loopax._src.core.batching.sequential import run_sequentially
from loopax._src.core.ir.lane_stages import OneByOne, Stages
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, loop_p, run
from loopax._src.core.jaxpr.dataflow import dependence_fixpoint, needed_inputs
from loopax._src.core.jaxpr.mapped_axis import (
    Axis,
    fill_axis,
    is_batched,
    move,
    refuse_sharded_lanes,
    uniform_body,
)
from loopax._src.core.jaxpr.operand_groups import flatten, map_leaves
from loopax._src.core.jaxpr.util import collective_over, either, weakly_cached
from loopax._src.jax_internals import axis_arguments, batched_outputs, happens
from loopax._src.messages import symbolic_lanes_message


@weakly_cached
def _uniform_loop(loop: Loop, axis: Axis, batched: LoopInputs, outputs: LoopOutputs) -> Loop:
    """The loop for all lanes at once, where all take the same steps."""
    inverse = loop.inverse and uniform_body(loop.inverse, axis, flatten(batched), outputs.carry)
    return loop._replace(body=uniform_body(loop.body, axis, flatten(batched), flatten(outputs)), inverse=inverse)


def batch_loop(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Run one loop for all lanes if they take the same steps; else run lanes in lockstep, or in stages.

    Operands are `low, high, *consts, *carry, *xs`; `dims` says at which axis each has its lanes, None if all lanes
    share it. In the new loop, consts and carry are `[lanes, ...]`; xs, ys and saved carries are `[rows, lanes, ...]`. A
    row of all lanes is then contiguous in memory, and the loop reads it in one piece.

    Lanes take different steps if they have limits of their own, or if the predicate is batched. In lockstep, finished
    lanes keep their carry and write no rows, so every lane has the results that it would have alone.
    """
    loop, axis = Loop(**params), Axis.of(axis_data)
    low, high, *leaves = operands
    windows, mapped = is_batched(dims[:2]), loop.inputs(dims[2:])
    batched = map_leaves(lambda d: d is not None, mapped)
    outputs = _batched_outputs(loop, axis_data, batched)
    differ = any(windows) or (loop.predicated and outputs.carry[0])
    loop = _as_chosen(loop, axis) if differ else loop
    batched = batched._replace(carry=(True,) * loop.num_carry if differ else outputs.carry)
    if isinstance(loop.stages, OneByOne) and axis.size and (differ or not _acts_for_all(loop, batched)):
        axes = result_axes(loop, 0, 0) if differ else result_axes(loop, None, None, outputs)
        return run_sequentially(_of_one_lane(loop, axis), loop.body, axis, operands, dims, is_batched(axes.leaves))
    given = _with_lanes(axis, loop.inputs(leaves), mapped, batched.carry)
    if differ:
        return _batch_lanes(
            loop, axis, low, high, LaneOperands(windows, own_limits(windows, low, high), batched, given)
        )
    out = run(_uniform_loop(loop, axis, batched, outputs), low, high, *given)
    return out.leaves, result_axes(loop, None, None, outputs).leaves


def _acts_for_all(loop: Loop, batched: LoopInputs) -> bool:
    """Whether the body has effects, and they are the same for all lanes: those of a value whose tangents are mapped."""
    if not happens(loop.body.effects):
        return False
    nothing = [False] * len(loop.body.out_avals)
    used = needed_inputs(loop.body, loop.carry_range, nothing)[1:]  # effects stay, and so does what they get
    return not any(map(and_, used, flatten(batched)))


def _as_chosen(loop: Loop, axis: Axis) -> Loop:
    """The loop with the way in which its lanes run, and why that is not what was asked for."""
    mixing = kept_together(loop.stages, loop.body)
    debug_info = loop.debug_info.mixed(mixing) if loop.debug_info and mixing else loop.debug_info
    return loop._replace(stages=chosen(loop.stages, loop.body, loop.num_consts, axis.size), debug_info=debug_info)


def _of_one_lane(loop: Loop, axis: Axis) -> Callable[..., Sequence[Any]]:
    """The loop of a lane, one of so many: it has its share of the memory, and shows its part of the progress."""
    reporting = loop.reporting and loop.reporting._replace(runs=axis.size, lanes=axis.size, size=1)
    loop = loop._replace(storage=loop.storage.part(1 / axis.size), reporting=reporting)
    return lambda *operands: loop_p.bind(*operands, **loop._asdict())


def _with_lanes(axis: Axis, inputs: LoopInputs, dims: LoopInputs, carry: Sequence[bool]) -> LoopInputs:
    """The operands with their axis of lanes where a loop has it: in front, and behind the rows of xs."""
    leaves = zip(inputs.carry, dims.carry, carry, strict=True)
    return LoopInputs(
        [move(x, d, 0) for x, d in zip(inputs.consts, dims.consts, strict=True)],
        [fill_axis(axis, x, d) if b else x for x, d, b in leaves],
        [move(x, d, 1) for x, d in zip(inputs.xs, dims.xs, strict=True)],
    )


def _batched_outputs(loop: Loop, axis_data: Any, batched: LoopInputs) -> LoopOutputs:
    """Which leaves of the carry and which ys are batched, at the fixed point."""
    if not collective_over(loop.body, axis_arguments(axis_data)["axis_name"]):
        inputs = (False, *flatten(batched))
        flags = dependence_fixpoint(loop.body, inputs, loop.carry_range, inverse=loop.inverse)
        return LoopOutputs(*map(tuple, loop.outputs(flags)))
    carry = tuple(batched.carry)
    while True:  # what has passed through a collective may be the same in all lanes again
        inputs = [False, *flatten(batched._replace(carry=carry))]
        new = loop.outputs(batched_outputs(loop.body, axis_data, inputs))
        if either(carry, new.carry) == carry:
            return LoopOutputs(carry, tuple(new.ys))
        carry = either(carry, new.carry)


def _batch_lanes(loop: Loop, axis: Axis, low: Any, high: Any, lanes: LaneOperands) -> Any:
    """Lanes that stop at different steps."""
    if isinstance(loop.stages, Stages) and not takes_any_step(loop):  # a select costs less than to gather the lanes
        if not isinstance(axis.size, int):
            raise NotImplementedError(symbolic_lanes_message(axis.size))
        refuse_sharded_lanes(axis)
        operands, mapped = [low, high, *flatten(lanes.inputs)], (*lanes.windows, *flatten(lanes.mapped))
        return compact_vmap(LOOPS, loop, axis, mapped, operands), LOOPS.result_axes(loop)
    out, num_steps = run_lanes(loop, axis, *_rows(loop, low, high), lanes)
    if num_steps is None:
        num_steps = jnp.broadcast_to(jnp.maximum(high - low, 0), (axis.size,))
    return out._replace(num_steps=num_steps).leaves, result_axes(loop, 0, None).leaves


def _rows(loop: Loop, low: Any, high: Any) -> tuple[Any, Any]:
    """The window of rows that holds those of all lanes."""
    if takes_any_step(loop):
        return jnp.int32(0), jnp.int32(1)
    return any_row(low, high) if loop.bound == 1 else hull(low, high)
