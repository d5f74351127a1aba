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
from loopax._src.core.jaxpr.util import Mask, split_list, stacked, trace, weakly_cached
from loopax._src.core.masking.substitute import fill_inactive
from loopax._src.core.row_buffers.versions import buffers
from loopax._src.jax_internals import ClosedJaxpr


@weakly_cached
def lockstep_sweep(
    static: ReverseSweep, axis: Axis, consts: Mask, xs: Mask, windows: Mask, window_avals: tuple[Any, ...]
) -> ReverseSweep:
    """Both bodies for lanes with windows of their own: consts are [lows], [highs], *consts."""
    avals, forward_avals = static.backward_avals, static.forward_avals
    state, carry = (True,) * static.num_state, (True,) * static.num_carry
    front = xs[: static.num_forward_xs]
    groups = [(consts, avals[0]), (state, forward_avals[1]), (front, forward_avals[2])]
    forward = _lanes_body(static.forward, axis, windows, window_avals, groups)
    groups = [(consts, avals[0]), (carry, avals[1]), ((*state, *xs), avals[2] + avals[3])]
    backward = _lanes_body(static.backward, axis, windows, window_avals, groups)
    num_consts = static.num_consts + len(window_avals)
    return static._replace(forward=forward, backward=backward, num_consts=num_consts, stages=None)


def _lanes_body(
    closed: ClosedJaxpr,
    axis: Axis,
    windows: Mask,
    window_avals: tuple[Any, ...],
    groups: Sequence[tuple[Mask, Sequence[Any]]],
) -> ClosedJaxpr:
    """A body (row, *consts, *carry, *rest) -> (*carry, *y) for lanes with windows of their own."""
    batched = [flag for mask, _ in groups for flag in mask]
    function = lane_function(closed, batched, axis.arguments)
    num_consts, num_carry = len(groups[0][0]), len(groups[1][0])
    filled_consts, filled = filled_operands(closed, groups[0][0], num_carry, groups[2][0])
    in_place = buffers(closed, range(1 + num_consts, 1 + num_consts + num_carry))
    y_avals = [stacked(a, axis.size) for a in closed.out_avals[num_carry:]]

    def body(row: Any, *operands: Any) -> list[Any]:
        window, consts, carry, rest = split_list(operands, [sum(windows), num_consts, num_carry])
        active = in_window(row, window, windows, axis)
        consts = fill_inactive(active, consts, filled_consts)

        def step() -> list[Any]:
            return step_lanes(function, active, row, consts, [*carry, *rest], filled, carry, in_place)

        return skip_idle_rows(step, active, carry, y_avals) if all(windows) else step()

    lanes = [aval for mask, group in groups for aval in lane_avals(group, mask, axis)]
    return trace(body, [closed.in_avals[0], *window_avals, *lanes])
