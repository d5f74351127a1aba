"""Batching: `jax.vmap` of loops.

Where all lanes take the same steps, the batch is one loop on larger arrays. Else it runs in lockstep
(`core/batching/lockstep.py`) or in stages (`core/batching/stages.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import log
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.autodiff.sweep import needs, sweep_fixpoint
from loopax._src.core.batching.compact import SWEEPS, compact_vmap
from loopax._src.core.batching.groups import run_sequentially
from loopax._src.core.batching.lockstep import (
    LaneOperands,
    any_row,
    hull,
    lockstep_sweep,
    own_limits,
    result_axes,
    run_lanes,
    takes_any_step,
    with_drift_of_lanes,
)
from loopax._src.core.batching.stages import LOOPS
from loopax._src.core.ir.lanes import AutoLanes, Compact, Lanes, Lockstep, Sequential, stage_sizes
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, loop_p, run
from loopax._src.core.ir.reverse_sweep import (
    ReverseSweep,
    SweepInputs,
    SweepOperands,
    checkpoint_and_sweep,
    reverse_sweep_p,
    run_sweep,
)
from loopax._src.core.jaxpr.cost import StepCost, step_cost
from loopax._src.core.jaxpr.dependence import dependence_fixpoint, mixing_primitive, needed_inputs
from loopax._src.core.jaxpr.evaluate import batch_expanded
from loopax._src.core.jaxpr.types import Axis, axes_of, fill_axis, is_batched, move, refuse_sharded_lanes, uniform_body
from loopax._src.core.jaxpr.util import Mask, collective_over, either, flatten, map_leaves, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, axis_arguments, batched_outputs, happens
from loopax._src.messages import symbolic_lanes_message

# Which way a batch whose lanes take different numbers of steps is expected to be fastest: `lanes="auto"`.
#
# The numbers of steps are not known where the batch is written, and are taken to be distributed as exponentials are.
# Then it takes `log(n / m)` mean numbers of steps until m of n lanes are left. What decides is what a step of one
# lane costs alone, and what it adds to a step of the batch (`core/jaxpr/cost.py`).


LAST_LANE = 0.58  # the limit of 1 + 1/2 + ... + 1/n - log(n): mean numbers of steps that the last lane takes alone


def chosen(how: Lanes, body: ClosedJaxpr, num_consts: int, lanes: Any) -> Lanes:
    """How a batch of so many lanes runs; what is no choice is as it is, unless its lanes must stay together."""
    if kept_together(how, body):
        return Lockstep()
    if not isinstance(how, AutoLanes):
        return how
    if not isinstance(lanes, int) or lanes < 2:
        return Lockstep()
    cost = step_cost(body, num_consts)
    sizes = stage_sizes(Compact(), lanes, cost.is_cheap)
    alone_is_fast = jax.default_backend() == "cpu"  # one lane keeps a core busy
    if alone_is_fast and not cost.is_spread(lanes) and cost.alone < _in_batch(cost, sizes):
        return Sequential()
    return Compact() if len(sizes) > 1 and not cost.is_cheap else Lockstep()


def kept_together(how: Lanes, body: ClosedJaxpr) -> str:
    """The primitive for which no lane may leave a batch: other lanes see it. Empty if lanes may leave, or never do."""
    return mixing_primitive(body) or "" if isinstance(how, Compact | AutoLanes) else ""


def _in_batch(cost: StepCost, sizes: Sequence[int]) -> float:
    """What a step of a lane costs in stages of these sizes, for each of its own steps."""
    durations = [log(size / smaller) for size, smaller in zip(sizes, [*sizes[1:], 1], strict=True)]
    durations[-1] += LAST_LANE
    lane_steps = sum(size * duration for size, duration in zip(sizes, durations, strict=True))
    return (lane_steps * cost.of_lane + sum(durations) * cost.of_batch) / sizes[0]


# Batching of reverse sweeps: all lanes on the same rows, in lockstep, or in stages, as loops are.


@weakly_cached
def _uniform_sweep(sweep: ReverseSweep, axis: Axis, batched: SweepInputs, ys: Mask) -> ReverseSweep:
    """The sweep for all lanes at once, where all walk the same rows."""
    outputs = (*batched.carry, *batched.state, *ys)
    inverse = sweep.inverse and uniform_body(sweep.inverse, axis, sweep.forward_inputs(batched), batched.state)
    step = uniform_body(sweep.step, axis, sweep.backward_inputs(batched), outputs)
    return with_drift_of_lanes(
        sweep._replace(step=step, inverse=inverse), axis, tuple(batched.state), (*batched.carry, *ys)
    )


def _without_saved(low: Any, high: Any, _: Any, *operands: Any, **params: Any) -> list[Any]:
    """A sweep that does not rely on what the forward loop saved."""
    sweep = ReverseSweep(**params)
    given = sweep.operands(operands)
    return flatten(checkpoint_and_sweep(sweep, low, high, given.inputs(given.init)))


# Lanes whose forward loops ran apart (pullbacks that were stacked) have not saved before the same rows.
_save_again = batch_expanded(_without_saved)


def batch_sweep(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Run one sweep for all lanes if they walk the same rows; else run lanes in lockstep, or in groups.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`; `dims` says at which axis each has
    its lanes, None if all lanes share it. In the new sweep, consts, init and carry are `[lanes, ...]`; saved, xs and ys
    are `[rows, lanes, ...]`, as in the loop that saved them (`batch_loop`). If lanes have `checkpoint_rows` of their
    own and do not run in groups, the sweep first walks forward again, to save before the same rows in all lanes.
    """
    sweep, axis = ReverseSweep(**params), Axis.of(axis_data)
    low, high, checkpoint_rows, *leaves = operands
    *windows, is_saved_apart = is_batched(dims[:3])
    windows = tuple(windows)
    mapped = sweep.operands(dims[3:])
    batched, ys = _batched(sweep, axis, map_leaves(lambda d: d is not None, mapped), any(windows))
    if any(windows):
        sweep = sweep._replace(lanes=chosen(sweep.lanes, sweep.forward, sweep.num_consts, axis.size))
    if isinstance(sweep.lanes, Sequential) and axis.size and (any(windows) or not _sweep_acts_for_all(sweep, batched)):
        alone = partial(reverse_sweep_p.bind, **sweep._asdict())
        return run_sequentially(alone, sweep.step, axis, operands, dims, (*batched.carry, *ys))
    in_groups = isinstance(sweep.lanes, Compact) and any(windows)
    if is_saved_apart and not in_groups:
        return _save_again(axis_data, operands, dims, **params)
    given = _sweep_with_lanes(axis, sweep.operands(leaves), mapped, batched)
    own = own_limits(windows, low, high)
    if not any(windows):
        lanes = _uniform_sweep(sweep, axis, batched, ys)
    else:
        if in_groups:
            refuse_sharded_lanes(axis)
            return _batch_in_groups(sweep, axis, (*windows, *flatten(batched)), [low, high], given)
        lanes = lockstep_sweep(
            sweep, axis, tuple(batched.consts), tuple(batched.xs), windows, tuple(map(jax.typeof, own))
        )
        low, high = hull(low, high)
    out = run_sweep(lanes, low, high, checkpoint_rows, *given._replace(consts=[*own, *given.consts]))
    return flatten(out), [*axes_of(batched.carry), *axes_of(ys, 1)]


def _sweep_acts_for_all(sweep: ReverseSweep, batched: SweepInputs) -> bool:
    """Whether the step has effects, and they are the same for all lanes: those of a value whose cotangents are mapped.

    As for a loop (`batch_loop`).
    """
    if not happens(sweep.step.effects):
        return False
    used = needs(sweep, (False,) * sweep.num_carry, (False,) * len(sweep.y_avals))
    return not any(map(and_, flatten(used), flatten(batched)))


def _batched(sweep: ReverseSweep, axis: Axis, mapped: SweepOperands, windows_differ: bool) -> tuple[SweepInputs, Mask]:
    """Which inputs of the bodies, and which ys, have an axis of lanes.

    All that a step computes has one where lanes walk other rows, and where the step may ask for a lane's place.
    """
    batched, ys = sweep_fixpoint(sweep, mapped.inputs(either(mapped.init, mapped.saved)), typed=False)
    if not windows_differ and not collective_over(sweep.step, axis.name):
        return batched, ys
    everything = batched._replace(state=(True,) * len(batched.state), carry=(True,) * len(batched.carry))
    return everything, (True,) * len(ys)


def _sweep_with_lanes(axis: Axis, operands: SweepOperands, dims: SweepOperands, batched: SweepInputs) -> SweepOperands:
    """The operands with their axis of lanes where a sweep has it: in front, and behind the rows of saved and xs."""

    def fill(mask: Sequence[bool], values: Sequence[Any], value_dims: Sequence[Any], to: int) -> list[Any]:
        return [fill_axis(axis, x, d, to) if b else x for b, x, d in zip(mask, values, value_dims, strict=True)]

    return SweepOperands(
        [move(x, d, 0) for x, d in zip(operands.consts, dims.consts, strict=True)],
        fill(batched.state, operands.init, dims.init, 0),
        fill(batched.state, operands.saved, dims.saved, 1),
        fill(batched.carry, operands.carry, dims.carry, 0),
        [move(x, d, 1) for x, d in zip(operands.xs, dims.xs, strict=True)],
    )


def _batch_in_groups(
    sweep: ReverseSweep, axis: Axis, mapped: Mask, window: Sequence[Any], given: SweepOperands
) -> tuple[list[Any], list[int]]:
    if not isinstance(axis.size, int):
        raise NotImplementedError(symbolic_lanes_message(axis.size))
    operands = [*window, *flatten(given.inputs(given.init))]
    return compact_vmap(SWEEPS, sweep, axis, mapped, operands), SWEEPS.result_axes(sweep)


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
    if isinstance(loop.lanes, Sequential) and axis.size and (differ or not _loop_acts_for_all(loop, batched)):
        axes = result_axes(loop, 0, 0) if differ else result_axes(loop, None, None, outputs)
        return run_sequentially(_of_one_lane(loop, axis), loop.body, axis, operands, dims, is_batched(axes.leaves))
    given = _loop_with_lanes(axis, loop.inputs(leaves), mapped, batched.carry)
    if differ:
        return _batch_lanes(
            loop, axis, low, high, LaneOperands(windows, own_limits(windows, low, high), batched, given)
        )
    out = run(_uniform_loop(loop, axis, batched, outputs), low, high, *given)
    return out.leaves, result_axes(loop, None, None, outputs).leaves


def _loop_acts_for_all(loop: Loop, batched: LoopInputs) -> bool:
    """Whether the body has effects, and they are the same for all lanes: those of a value whose tangents are mapped."""
    if not happens(loop.body.effects):
        return False
    nothing = [False] * len(loop.body.out_avals)
    used = needed_inputs(loop.body, loop.carry_range, nothing)[1:]  # effects stay, and so does what they get
    return not any(map(and_, used, flatten(batched)))


def _as_chosen(loop: Loop, axis: Axis) -> Loop:
    """The loop with the way in which its lanes run, and why that is not what was asked for."""
    mixing = kept_together(loop.lanes, loop.body)
    debug_info = loop.debug_info.mixed(mixing) if loop.debug_info and mixing else loop.debug_info
    return loop._replace(lanes=chosen(loop.lanes, loop.body, loop.num_consts, axis.size), debug_info=debug_info)


def _of_one_lane(loop: Loop, axis: Axis) -> Callable[..., Sequence[Any]]:
    """The loop of a lane, one of so many: it has its share of the memory, and shows its part of the progress."""
    reporting = loop.reporting and loop.reporting._replace(runs=axis.size, lanes=axis.size, size=1)
    loop = loop._replace(share=loop.share / axis.size, reporting=reporting)
    return lambda *operands: loop_p.bind(*operands, **loop._asdict())


def _loop_with_lanes(axis: Axis, inputs: LoopInputs, dims: LoopInputs, carry: Sequence[bool]) -> LoopInputs:
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
    if isinstance(loop.lanes, Compact) and not takes_any_step(loop):  # a select costs less than to gather the lanes
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
