"""Batching of reverse sweeps: all lanes on the same rows, in lockstep, or in stages, as loops are."""

from collections.abc import Sequence
from functools import partial
from operator import and_
from typing import Any

import jax

from loopax._src.core.autodiff.sweep_jvp import sweep_fixpoint
from loopax._src.core.autodiff.sweep_partial_eval import needs
from loopax._src.core.batching.choice import chosen
from loopax._src.core.batching.compact.primitive import compact_vmap
from loopax._src.core.batching.compact.sweep import SWEEPS
from loopax._src.core.batching.lockstep_loop import own_limits
from loopax._src.core.batching.lockstep_sweep import lockstep_sweep, with_drift_of_lanes
from loopax._src.core.batching.masked_step import hull
from loopax._src.core.batching.sequential import run_sequentially
from loopax._src.core.ir.lane_stages import OneByOne, Stages
from loopax._src.core.ir.reverse_sweep import (
    ReverseSweep,
    SweepInputs,
    SweepOperands,
    checkpoint_and_sweep,
    reverse_sweep_p,
    run_sweep,
)
from loopax._src.core.jaxpr.expand import batch_expanded
from loopax._src.core.jaxpr.mapped_axis import (
    Axis,
    axes_of,
    fill_axis,
    is_batched,
    move,
    refuse_sharded_lanes,
    uniform_body,
)
from loopax._src.core.jaxpr.operand_groups import flatten, map_leaves
from loopax._src.core.jaxpr.util import Mask, collective_over, either, weakly_cached
from loopax._src.jax_internals import happens
from loopax._src.messages import symbolic_lanes_message


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
        sweep = sweep._replace(stages=chosen(sweep.stages, sweep.forward, sweep.num_consts, axis.size))
    if isinstance(sweep.stages, OneByOne) and axis.size and (any(windows) or not _acts_for_all(sweep, batched)):
        alone = partial(reverse_sweep_p.bind, **sweep._asdict())
        return run_sequentially(alone, sweep.step, axis, operands, dims, (*batched.carry, *ys))
    in_groups = isinstance(sweep.stages, Stages) and any(windows)
    if is_saved_apart and not in_groups:
        return _save_again(axis_data, operands, dims, **params)
    given = _with_lanes(axis, sweep.operands(leaves), mapped, batched)
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


def _acts_for_all(sweep: ReverseSweep, batched: SweepInputs) -> bool:
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


def _with_lanes(axis: Axis, operands: SweepOperands, dims: SweepOperands, batched: SweepInputs) -> SweepOperands:
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
