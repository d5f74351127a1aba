"""A batch of reverse sweeps in lockstep: lanes whose windows of rows differ share the row number, as in the loop."""

from typing import Any

from loopax._src.core.batching.masked_step import lanes_body
from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.mapped_axis import Axis
from loopax._src.core.jaxpr.util import Mask, weakly_cached


@weakly_cached
def lockstep_sweep(
    sweep: ReverseSweep, axis: Axis, consts: Mask, xs: Mask, windows: Mask, window_avals: tuple[Any, ...]
) -> ReverseSweep:
    """The step for lanes with windows of their own: consts are [lows], [highs], *consts."""
    carry, state = (True,) * sweep.num_carry, (True,) * sweep.num_state
    front = xs[: sweep.num_forward_xs]
    return sweep._replace(
        step=lanes_body(sweep.step, axis, windows, window_avals, [consts, (*carry, *state), xs]),
        inverse=sweep.inverse and lanes_body(sweep.inverse, axis, windows, window_avals, [consts, state, front]),
        num_consts=sweep.num_consts + len(window_avals),
        stages=None,
    )
