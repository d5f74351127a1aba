"""Batching: `jax.vmap` of loops.

Where all lanes take the same steps, the batch is one loop on larger arrays. Else it runs in lockstep
(`core/batching/lockstep.py`) or in stages (`core/batching/compact_stages.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.autodiff.partial_eval import unknown_outputs
from loopax._src.core.autodiff.sweep import needs, sweep_fixpoint
from loopax._src.core.batching import lockstep
from loopax._src.core.batching.compact_primitive import SWEEPS, BatchRules, compact_vmap
from loopax._src.core.batching.compact_stages import LOOPS
from loopax._src.core.batching.groups import run_sequentially
from loopax._src.core.ir.lane_choice import chosen, estimates, gathered, kept_together, of_uniform
from loopax._src.core.ir.lanes import AutoLanes, Compact, Lockstep, Sequential
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, loop_p, run
from loopax._src.core.ir.reverse_sweep import (
    ReverseSweep,
    SweepInputs,
    SweepOperands,
    checkpoint_and_sweep,
    reverse_sweep_p,
    run_sweep,
)
from loopax._src.core.jaxpr.dependence import needed_inputs
from loopax._src.core.jaxpr.types import (
    Axis,
    axes_of,
    fill_axis,
    is_batched,
    refuse_gathering,
    uniform_body,
)
from loopax._src.core.jaxpr.util import (
    Groups,
    Mask,
    collective_over,
    either,
    flatten,
    map_leaves,
    select,
    weakly_cached,
)
from loopax._src.core.masking import over_lanes
from loopax._src.jax_internals import (
    ClosedJaxpr,
    axis_arguments,
    batched_outputs,
    communicates_over,
    equations_in,
    happens,
)

# Batching of reverse sweeps: all lanes on the same rows, in lockstep, or in stages, as loops are.


@weakly_cached
def _uniform_sweep(sweep: ReverseSweep, axis: Axis, batched: SweepInputs, ys: Mask) -> ReverseSweep:
    """The sweep for all lanes at once, where all walk the same rows."""
    outputs = (*batched.carry, *batched.state, *ys)
    inverse = sweep.inverse and uniform_body(sweep.inverse, axis, sweep.forward_inputs(batched), batched.state)
    inputs = LoopInputs(tuple(batched.consts), (*batched.carry, *batched.state), tuple(batched.xs))
    step = lockstep.step_of_all(sweep.step, axis, inputs, outputs)
    lanes = of_uniform(sweep.lanes, axis.size)
    return lockstep.with_drift_of_lanes(
        sweep._replace(step=step, inverse=inverse, lanes=lanes), axis, tuple(batched.state), (*batched.carry, *ys)
    )


def batch_sweep(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Run one sweep for all lanes if they walk the same rows; else run lanes in lockstep, or in groups.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`; `dims` says at which axis each has
    its lanes, None if all lanes share it. In the new sweep, consts, init and carry are `[lanes, ...]`; saved, xs and ys
    are `[rows, lanes, ...]`, as in the loop that saved them (`batch_loop`). If lanes have `checkpoint_rows` of their
    own and do not run in groups, the sweep first walks forward again, to save before the same rows in all lanes.
    """
    sweep, axis = ReverseSweep(**params), Axis.of(axis_data)
    low, high, checkpoint_rows, *leaves = operands
    has_limits, (is_saved_apart,), mapped = is_batched(dims[:2]), is_batched(dims[2:3]), sweep.operands(dims[3:])
    differ = any(has_limits)
    has_lanes = map_leaves(lambda d: d is not None, mapped)
    batched, ys = sweep_fixpoint(sweep, has_lanes.inputs(either(has_lanes.init, has_lanes.saved)), typed=False)
    if differ or collective_over(sweep.step, axis.name):
        # Lanes walk other rows, or the step may ask for a lane's place: all that it computes has an axis of lanes.
        batched = batched._replace(state=(True,) * sweep.num_state, carry=(True,) * sweep.num_carry)
        ys = (True,) * len(ys)
    if differ:
        sweep = sweep._replace(lanes=chosen(sweep.lanes, sweep.forward, sweep.num_consts, _gathered_lanes(axis)))
    if isinstance(sweep.lanes, Sequential) and axis.size:
        # A value whose cotangents are mapped has effects that are the same for all lanes (as in `batch_loop`).
        acting = partial(needs, sweep, (False,) * sweep.num_carry, (False,) * len(sweep.y_avals))
        if differ or not _acts_for_all(sweep.step, acting, batched):
            alone = partial(reverse_sweep_p.bind, **sweep._asdict())
            return run_sequentially(alone, sweep.step, axis, operands, dims, (*batched.carry, *ys))
    # Before: lanes at `dims` -> After: [lanes, ...] of consts, init and carry; [rows, lanes, ...] of saved and xs
    given = _with_lanes(axis, sweep.operands(leaves), mapped, SweepOperands.of(batched), (0, 0, 1, 0, 1))
    if isinstance(sweep.lanes, Compact) and differ:
        values = [low, high, *flatten(given.inputs(given.init))]
        return _gathered(SWEEPS, sweep, axis, (*has_limits, *flatten(batched)), values)
    own = select(has_limits, (low, high))
    if differ:
        own_avals = tuple(map(jax.typeof, own))
        lanes = lockstep.lockstep_sweep(sweep, axis, tuple(batched.consts), tuple(batched.xs), has_limits, own_avals)
        low, high = lockstep.hull(low, high)
    else:
        lanes = _uniform_sweep(sweep, axis, batched, ys)
    given = given._replace(consts=[*own, *given.consts])
    if is_saved_apart:  # lanes whose forward loops ran apart (stacked pullbacks) have not saved before the same rows
        out = checkpoint_and_sweep(lanes, low, high, given.inputs(given.init))
    else:
        out = run_sweep(lanes, low, high, checkpoint_rows, *given)
    return flatten(out), [*axes_of(batched.carry), *axes_of(ys, 1)]


def _acts_for_all(body: ClosedJaxpr, acting: Callable[[], Any], batched: Any) -> bool:
    """Whether a body has effects, and none of the inputs that these need (`acting()`) has lanes: they happen once."""
    return happens(body.effects) and not any(map(and_, flatten(acting()), flatten(batched)))


def _with_lanes(axis: Axis, operands: Groups, dims: Groups, has_lanes: Groups, places: Sequence[int]) -> Groups:
    """The operands with their axis of lanes where each group has it in a batch; one that all share may get one, too."""
    groups = zip(operands, dims, has_lanes, places, strict=True)
    moved = ((zip(*group, strict=True), to) for *group, to in groups)
    return type(operands)(*([fill_axis(axis, x, d, to) if own else x for x, d, own in leaves] for leaves, to in moved))


def _gathered(rules: BatchRules, static: Any, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> Any:
    """Lanes that are gathered into smaller batches while they run."""
    refuse_gathering(axis)
    return compact_vmap(rules, static, axis, mapped, operands), rules.result_axes(static)


@weakly_cached
def _uniform_loop(loop: Loop, axis: Axis, batched: LoopInputs, outputs: LoopOutputs) -> Loop:
    """The loop for all lanes at once, where all take the same steps."""
    inverse = loop.inverse and uniform_body(loop.inverse, axis, flatten(batched), outputs.carry)
    body = lockstep.step_of_all(loop.body, axis, batched, flatten(outputs))
    return loop._replace(body=body, inverse=inverse, lanes=of_uniform(loop.lanes, axis.size))


def _gathered_lanes(axis: Axis) -> Any:
    """How many lanes there are to choose for: lanes on several devices are none."""
    return axis.size if axis.mesh_axis is None else None


def _with_chosen_lanes(loop: Loop, size: Any, batched: LoopInputs) -> Loop:
    """The loop with the way in which a batch of so many lanes runs, and why for `explain`."""
    moved = select(flatten(batched), loop.body.in_avals[1:])
    loop = loop._replace(lanes=gathered(loop.lanes, loop.body, loop.num_consts, moved, size))
    walks_again = loop.bound != 1 and not loop.saving and not any(map(communicates_over, equations_in(loop.body)))
    lanes, debug_info = chosen(loop.lanes, loop.body, loop.num_consts, size, walks_again), loop.debug_info
    if debug_info and (mixing := kept_together(loop.lanes, loop.body)):
        debug_info = replace(debug_info, mixed_by=mixing)
    elif debug_info and isinstance(loop.lanes, AutoLanes | Lockstep) and isinstance(size, int) and size > 1:
        how = loop.lanes if isinstance(loop.lanes, AutoLanes) else AutoLanes()
        expected = estimates(how, loop.body, loop.num_consts, size)
        debug_info = replace(debug_info, lanes_expected=tuple((repr(how), ns) for how, ns in expected.items()))
    return loop._replace(lanes=lanes, debug_info=debug_info)


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
    has_limits, mapped = is_batched(dims[:2]), loop.inputs(dims[2:])
    batched = map_leaves(lambda d: d is not None, mapped)
    outputs = _batched_outputs(loop, axis_data, batched)
    differ = any(has_limits) or (loop.predicated and outputs.carry[0])
    batched = batched._replace(carry=(True,) * loop.num_carry if differ else outputs.carry)
    if differ:
        loop = _with_chosen_lanes(loop, _gathered_lanes(axis), batched)
    if isinstance(loop.lanes, Sequential) and axis.size:
        # A value whose tangents are mapped has effects that are the same for all lanes: they stay without any output.
        nothing = [False] * len(loop.body.out_avals)
        acting = lambda: [needed_inputs(loop.body, loop.carry_range, nothing)[1:]]  # noqa: E731
        if differ or not _acts_for_all(loop.body, acting, batched):
            axes = lockstep.result_axes(loop, 0, 0) if differ else lockstep.result_axes(loop, None, None, outputs)
            # A lane has its share of the memory, and shows its part of the progress.
            reporting = loop.reporting and loop.reporting._replace(runs=axis.size, lanes=axis.size, size=1)
            of_lane = loop._replace(share=loop.share / axis.size, reporting=reporting)
            alone = partial(loop_p.bind, **of_lane._asdict())
            return run_sequentially(alone, loop.body, axis, operands, dims, is_batched(axes.leaves))
    loop = loop._replace(is_batch=True)
    # Before: lanes at `dims` -> After: [lanes, ...] of consts and carry; [rows, lanes, ...] of xs
    given = _with_lanes(axis, loop.inputs(leaves), mapped, batched, (0, 0, 1))
    if not differ:
        out = run(_uniform_loop(loop, axis, batched, outputs), low, high, *given)
        return out.leaves, lockstep.result_axes(loop, None, None, outputs).leaves
    if lockstep.takes_any_step(loop):
        rows = jnp.int32(0), jnp.int32(1)
    elif isinstance(loop.lanes, Compact):  # of a step that all lanes take, a select costs less than to gather them
        return _gathered(LOOPS, loop, axis, (*has_limits, *flatten(batched)), [low, high, *flatten(given)])
    elif loop.bound == 1:
        rows = jnp.int32(0), over_lanes(jnp.any, low < high).astype(jnp.int32)  # bools are searched faster than numbers
    else:
        rows = lockstep.hull(low, high)
    lanes = lockstep.LaneOperands(has_limits, select(has_limits, (low, high)), batched, given)
    out, num_steps = lockstep.run_lanes(loop, axis, *rows, lanes)
    if num_steps is None:
        num_steps = lockstep.steps_of_each(low, high, axis)
    return out._replace(num_steps=num_steps).leaves, lockstep.result_axes(loop, 0, None).leaves


def _batched_outputs(loop: Loop, axis_data: Any, batched: LoopInputs) -> LoopOutputs:
    """Which leaves of the carry and which ys are batched, at the fixed point."""
    if not collective_over(loop.body, axis_arguments(axis_data)["axis_name"]):
        return unknown_outputs(loop, batched)  # what depends on lanes is found as what depends on the unknown
    carry = tuple(batched.carry)
    while True:  # what has passed through a collective may be the same in all lanes again
        inputs = [False, *flatten(batched._replace(carry=carry))]
        new = loop.outputs(batched_outputs(loop.body, axis_data, inputs))
        if either(carry, new.carry) == carry:
            return LoopOutputs(carry, tuple(new.ys))
        carry = either(carry, new.carry)
