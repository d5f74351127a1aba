"""A batch of reverse sweeps in lockstep: lanes whose windows of rows differ share the row number, as in the loop."""

from collections.abc import Sequence
from typing import Any

from loopax._src.core.batching.masked_step import (
    filled_operands,
    in_window,
    lane_function,
    skip_idle_rows,
    step_lanes,
)
from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.mapped_axis import Axis, lane_avals
from loopax._src.core.jaxpr.operand_groups import flatten
from loopax._src.core.jaxpr.util import Mask, split_list, stacked, trace, weakly_cached
from loopax._src.core.masking.substitute import fill_inactive
from loopax._src.core.row_buffers.versions import buffers
from loopax._src.jax_internals import ClosedJaxpr


@weakly_cached
def lockstep_sweep(
    sweep: ReverseSweep, axis: Axis, consts: Mask, xs: Mask, windows: Mask, window_avals: tuple[Any, ...]
) -> ReverseSweep:
    """The step for lanes with windows of their own: consts are [lows], [highs], *consts."""
    carry = (True,) * (sweep.num_carry + sweep.num_state)
    step = _lanes_body(sweep.step, axis, windows, window_avals, [consts, carry, xs])
    return sweep._replace(step=step, num_consts=sweep.num_consts + len(window_avals), stages=None)


def _lanes_body(
    closed: ClosedJaxpr, axis: Axis, windows: Mask, window_avals: tuple[Any, ...], mapped: Sequence[Mask]
) -> ClosedJaxpr:
    """A body (row, *consts, *carry, *others) -> (*carry, *y) for lanes with windows of their own.

    mapped: which consts, carry leaves and others have an axis of lanes.
    """
    function = lane_function(closed, flatten(mapped), axis.arguments)
    consts_mapped, carry_mapped, others_mapped = mapped
    num_consts, num_carry = len(consts_mapped), len(carry_mapped)
    filled_consts, filled = filled_operands(closed, consts_mapped, num_carry, others_mapped)
    in_place = buffers(closed, range(1 + num_consts, 1 + num_consts + num_carry))
    y_avals = [stacked(a, axis.size) for a in closed.out_avals[num_carry:]]

    def body(row: Any, *operands: Any) -> list[Any]:
        window, consts, carry, others = split_list(operands, [sum(windows), num_consts, num_carry])
        active = in_window(row, window, windows, axis)
        consts = fill_inactive(active, consts, filled_consts)

        def step() -> list[Any]:
            return step_lanes(function, active, row, consts, [*carry, *others], filled, carry, in_place)

        return skip_idle_rows(step, active, carry, y_avals) if all(windows) else step()

    lanes = lane_avals(closed.in_avals[1:], flatten(mapped), axis)
    return trace(body, [closed.in_avals[0], *window_avals, *lanes])
