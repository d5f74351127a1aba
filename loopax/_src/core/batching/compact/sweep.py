"""A batch of reverse sweeps that does not wait for the lane with the most rows.

The windows of all lanes are known, for their loops have run, so lanes are sorted into groups of similar lengths. What
their loops saved does not fit these groups: lanes that leave a batch early are in another place there. So each group
walks forward again, saving.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.batching.compact.groups import GroupProgram, in_groups
from loopax._src.core.batching.compact.primitive import BatchRules
from loopax._src.core.batching.lockstep_loop import own_limits
from loopax._src.core.batching.lockstep_sweep import lockstep_sweep
from loopax._src.core.batching.masked_step import hull
from loopax._src.core.ir.lane_stages import Stages
from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepInputs, checkpoint_and_sweep
from loopax._src.core.jaxpr.mapped_axis import Axis
from loopax._src.core.jaxpr.operand_groups import flatten, unflatten
from loopax._src.core.jaxpr.util import Mask


def _run(sweep: ReverseSweep, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """The program of a batch; operands are `low, high, *consts, *init, *carry, *xs`."""
    assert isinstance(sweep.stages, Stages)

    def run_group(lanes: int, operands: Sequence[Any]) -> list[Any]:
        return _in_lockstep(sweep, axis.resized(lanes, similar=lanes < axis.size), mapped, operands)

    low, high = operands[:2]
    program = GroupProgram(run_group, mapped, _operand_axes(sweep), _result_axes(sweep))
    return in_groups(program, sweep.stages, jnp.broadcast_to(high - low, (axis.size,)), operands)


def _in_lockstep(sweep: ReverseSweep, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Walk forward saving, then back."""
    low, high, *leaves = operands
    windows, has_lanes = mapped[:2], _inputs(sweep, mapped[2:])
    own = own_limits(windows, low, high)
    own_avals = tuple(map(jax.typeof, own))
    lanes = lockstep_sweep(sweep, axis, tuple(has_lanes.consts), tuple(has_lanes.xs), windows, own_avals)
    inputs = _inputs(sweep, leaves)
    inputs = inputs._replace(consts=[*own, *inputs.consts])
    return flatten(checkpoint_and_sweep(lanes, *hull(low, high), inputs))


def _inputs(sweep: ReverseSweep, leaves: Sequence[Any]) -> SweepInputs:
    """By name what stands for each operand behind `low` and `high`: the states are given by the first one, `init`."""
    return unflatten(sweep.backward_avals, leaves)


def _operand_axes(sweep: ReverseSweep) -> list[int]:
    consts, state, carry, xs = sweep.backward_avals
    return [0, 0, *(0 for _ in (*consts, *state, *carry)), *(1 for _ in xs)]


def _result_axes(sweep: ReverseSweep) -> list[int]:
    return [0] * sweep.num_carry + [1] * len(sweep.y_avals)


SWEEPS = BatchRules(_run, _operand_axes, _result_axes, lambda _, mapped: any(mapped[:2]))
