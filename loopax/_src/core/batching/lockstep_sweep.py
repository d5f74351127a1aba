"""A batch of reverse sweeps in lockstep: lanes whose windows of rows differ share the row number, as in the loop.

Also the check of an inverse at the end of the way back, which is that of each lane in any batch of sweeps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from loopax._src.core.batching.masked_step import lanes_body
from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.mapped_axis import Axis, axes_of
from loopax._src.core.jaxpr.util import Mask, merge_lists, reject, select, weakly_cached


@weakly_cached
def lockstep_sweep(
    sweep: ReverseSweep, axis: Axis, consts: Mask, xs: Mask, windows: Mask, window_avals: tuple[Any, ...]
) -> ReverseSweep:
    """The step for lanes with windows of their own: consts are [lows], [highs], *consts."""
    carry, state = (True,) * sweep.num_carry, (True,) * sweep.num_state
    front = xs[: sweep.num_forward_xs]
    lanes = sweep._replace(
        step=lanes_body(sweep.step, axis, windows, window_avals, [consts, (*carry, *state), xs]),
        inverse=sweep.inverse and lanes_body(sweep.inverse, axis, windows, window_avals, [consts, state, front]),
        num_consts=sweep.num_consts + len(window_avals),
        stages=None,
    )
    return with_drift_of_lanes(lanes, axis, state, (True,) * (sweep.num_carry + len(sweep.y_avals)))


def with_drift_of_lanes(sweep: ReverseSweep, axis: Axis, state: Mask, results: Mask) -> ReverseSweep:
    """The sweep of a batch with the drift of each lane in its check; these leaves and results have lanes."""
    drift = sweep.saving.drift
    if drift is None or not any(state):
        return sweep
    of_lanes = _DriftOfLanes(drift, axis, state, results, sweep.num_carry)
    saving = replace(sweep.saving, drift=of_lanes)  # pyright: ignore[reportArgumentType] - all savings are dataclasses
    return sweep._replace(saving=saving)


@dataclass(frozen=True)
class _DriftOfLanes:
    """`Saving.drift` of a batch: a lane that has drifted says nothing of the others.

    Results without lanes have come from states without lanes, and are checked by these.
    """

    of_lane: Callable[[Any, Any, Any, Any], Any]
    axis: Axis
    state: Mask  # which leaves of the state have lanes
    results: Mask  # which results have: carries in front, ys behind their rows
    num_carry: int

    def __call__(self, start: Any, end: Any, last: Any, results: Sequence[Any]) -> list[Any]:
        states, out = axes_of(self.state), [int(i >= self.num_carry) for i in range(len(results))]
        given = [at if has_lanes else None for at, has_lanes in zip(out, self.results, strict=True)]
        mapped = jax.vmap(self.of_lane, in_axes=(states, states, states, given), out_axes=out, **self.axis.arguments)
        of_lanes = mapped(list(start), list(end), list(last), list(results))
        if all(self.results):
            return of_lanes
        without = [_first(x, at) for x, at in zip(results, given, strict=True)]
        of_all = self.of_lane(*self._shared(start, end, last), without)  # pyright: ignore[reportCallIssue]
        return merge_lists(self.results, reject(self.results, of_all), select(self.results, of_lanes))

    def _shared(self, *states: Any) -> list[list[Any]]:
        """Start, end and last carry without lanes; leaves with lanes as if they had come back to their start."""
        own = [_first(x, 0) for x in select(self.state, states[0])]
        return [merge_lists(self.state, reject(self.state, leaves), own) for leaves in states]


def _first(x: Any, axis: int | None) -> Any:
    """That of the first lane, if there are lanes."""
    return x if axis is None else jax.lax.index_in_dim(x, 0, axis, keepdims=False)
