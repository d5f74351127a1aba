"""A batch of reverse sweeps that does not wait for the lane with the most rows.

The windows of all lanes are known, for their loops have run, so lanes are dealt into groups. Their loops saved nothing
for that (lanes that leave a batch early are in another place there), so each group walks forward again, saving.
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
from loopax._src.core.ir.loop import run
from loopax._src.core.ir.reverse_sweep import ReverseSweep, checkpointing_loop, run_sweep
from loopax._src.core.jaxpr.mapped_axis import Axis
from loopax._src.core.jaxpr.util import Mask, split_list


def _run(static: ReverseSweep, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """The program of a batch; operands are low, high, *consts, *init, *carry, *xs."""
    assert static.stages is not None

    def run_group(lanes: int, operands: Sequence[Any]) -> list[Any]:
        return _in_lockstep(static, axis.resized(lanes, similar=lanes < axis.size), mapped, operands)

    low, high = operands[:2]
    program = GroupProgram(run_group, mapped, _operand_axes(static), _result_axes(static))
    return in_groups(program, static.stages, jnp.broadcast_to(high - low, (axis.size,)), operands)


def _in_lockstep(static: ReverseSweep, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Walk forward saving, then back."""
    (low, high), consts, init, carry, xs = split_list(operands, _sizes(static))
    windows, mapped_consts, _, _, mapped_xs = (tuple(m) for m in split_list(mapped, _sizes(static)))
    own = own_limits(windows, low, high)
    lanes = lockstep_sweep(static, axis, mapped_consts, mapped_xs, windows, tuple(map(jax.typeof, own)))
    rows, consts = hull(low, high), [*own, *consts]
    loop = checkpointing_loop(lanes, lanes.forward, len(consts), len(init))
    out = run(loop, *rows, consts, init, xs[: static.num_forward_xs])
    (checkpoint_rows,) = out.checkpoint_rows
    new_carry, ys = run_sweep(lanes, *rows, checkpoint_rows, consts, init, out.saved, carry, xs)
    return [*new_carry, *ys]


def _sizes(static: ReverseSweep) -> list[int]:
    return [2, static.num_consts, static.num_state, static.num_carry]


def _operand_axes(static: ReverseSweep) -> list[int]:
    return [0] * sum(_sizes(static)) + [1] * len(static.backward_avals[3])


def _result_axes(static: ReverseSweep) -> list[int]:
    return [0] * static.num_carry + [1] * len(static.y_avals)


SWEEPS = BatchRules(_run, _operand_axes, _result_axes, lambda _, mapped: any(mapped[:2]))
