"""Batching of reverse sweeps: lanes whose windows of rows differ share the row number, as in the loop."""

from collections.abc import Sequence
from typing import Any

import jax

from loopax._compat import ClosedJaxpr, batching
from loopax.core.axes import Axis, axes_of, fill_axis, is_batched, lane_avals, move, uniform_body
from loopax.core.expansion import batch_expanded
from loopax.core.jaxprs import Mask, select, split, stacked, trace, weakly_cached
from loopax.core.lanes import borrowed_operands, hull, in_window, lane_function, skip_idle_rows, step_lanes
from loopax.core.lending import Lent, large_constants
from loopax.core.replay import Replay, lending_replay, replay, replay_p, walk_and_replay
from loopax.core.replay_jvp import reached


@weakly_cached
def _uniform_replay(static: Replay, axis: Axis, consts: Mask, state: Mask, carry: Mask, xs: Mask, ys: Mask) -> Replay:
    forward_inputs = (*consts, *state, *xs[: static.num_forward_xs])
    return static._replace(
        forward=uniform_body(static.forward, axis, forward_inputs, state),
        backward=uniform_body(static.backward, axis, (*consts, *carry, *state, *xs), (*carry, *ys)),
    )


@weakly_cached
def _lanes_replay(
    static: Replay, axis: Axis, consts: Mask, xs: Mask, windows: Mask, window_avals: tuple[Any, ...]
) -> Replay:
    """Both bodies for lanes with windows of their own: consts are [lows], [highs], *consts."""
    avals, forward_avals = static.backward_avals, static.forward_avals
    state, carry = (True,) * static.num_state, (True,) * static.num_carry
    front = xs[: static.num_forward_xs]
    const_avals = lane_avals(avals[0], consts, axis)
    large = large_constants(const_avals, consts)
    groups = [(consts, avals[0]), (state, forward_avals[1]), (front, forward_avals[2])]
    forward = _lanes_body(static.forward, axis, windows, window_avals, large, groups)
    groups = [(consts, avals[0]), (carry, avals[1]), ((*state, *xs), avals[2] + avals[3])]
    backward = _lanes_body(static.backward, axis, windows, window_avals, large, groups)

    def activity(row: Any, *consts: Any) -> list[Any]:
        return [in_window(row, consts, windows, axis)]

    lent = None
    if any(large):
        traced = trace(activity, [static.forward.in_avals[0], *window_avals, *const_avals])
        lent = Lent(traced, (False,) * len(window_avals) + large)
    num_consts = static.num_consts + len(window_avals)
    return static._replace(forward=forward, backward=backward, num_consts=num_consts, lent=lent)


def _lanes_body(
    closed: ClosedJaxpr,
    axis: Axis,
    windows: Mask,
    window_avals: tuple[Any, ...],
    lent: Mask,
    groups: Sequence[tuple[Mask, Sequence[Any]]],
) -> ClosedJaxpr:
    """A body (row, *consts, *carry, *rest) -> (*carry, *y) for lanes with windows of their own."""
    batched = [flag for mask, _ in groups for flag in mask]
    function = lane_function(closed, batched, axis.arguments)
    num_consts, num_carry = len(groups[0][0]), len(groups[1][0])
    borrowed = borrowed_operands(closed, groups[0][0], lent, num_carry, groups[2][0])
    y_avals = [stacked(a, axis.size) for a in closed.out_avals[num_carry:]]

    def body(row: Any, *operands: Any) -> list[Any]:
        window, consts, carry, rest = split(operands, [sum(windows), num_consts, num_carry])
        active = in_window(row, window, windows, axis)

        def step() -> list[Any]:
            return step_lanes(function, active, row, [*consts, *carry, *rest], borrowed, carry)

        return skip_idle_rows(step, active, carry, y_avals) if all(windows) else step()

    lanes = [aval for mask, group in groups for aval in lane_avals(group, mask, axis)]
    return trace(body, [closed.in_avals[0], *window_avals, *lanes])


def _without_saved(low: Any, high: Any, _: Any, *operands: Any, **params: Any) -> list[Any]:
    """A sweep that does not rely on what the forward loop saved."""
    static = Replay(**params)
    consts, init, _, carry, xs = split(operands, static.sizes)
    carry, ys = walk_and_replay(static, low, high, consts, init, carry, xs)
    return [*carry, *ys]


# Lanes whose forward loops ran apart (pullbacks that were stacked) have not saved before the same rows.
_save_again = batch_expanded(replay_p, _without_saved)


def _batch_replay(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    static, axis = lending_replay(Replay(**params)), Axis(axis_data)
    (low, high, marks), consts, init, saved, carry, xs = split(operands, [3, *static.sizes])
    (*window_dims, marks_dim), const_dims, init_dims, saved_dims, carry_dims, x_dims = split(dims, [3, *static.sizes])
    if marks_dim is not None:
        return _save_again(axis_data, operands, dims, **params)
    consts_mask, xs_mask, windows = is_batched(const_dims), is_batched(x_dims), is_batched(window_dims)
    started = tuple(a is not None or b is not None for a, b in zip(init_dims, saved_dims, strict=True))
    state_mask, carry_mask, ys_mask = reached(
        static, consts_mask, started, is_batched(carry_dims), xs_mask, typed=False
    )
    if any(windows):
        state_mask, carry_mask, ys_mask = ((True,) * len(m) for m in (state_mask, carry_mask, ys_mask))

    def fill(mask: Mask, values: Sequence[Any], value_dims: Sequence[Any], to: int) -> list[Any]:
        return [fill_axis(axis, x, d, to) if b else x for b, x, d in zip(mask, values, value_dims, strict=True)]

    arguments = [
        [move(x, d, 0) for x, d in zip(consts, const_dims, strict=True)],
        fill(state_mask, init, init_dims, 0),
        fill(state_mask, saved, saved_dims, 1),
        fill(carry_mask, carry, carry_dims, 0),
        [move(x, d, 1) for x, d in zip(xs, x_dims, strict=True)],
    ]
    if any(windows):
        own = select(windows, (low, high))
        window_avals = tuple(jax.typeof(x) for x in own)
        lanes = _lanes_replay(static, axis, consts_mask, xs_mask, windows, window_avals)
        arguments[0] = [*own, *arguments[0]]
        low, high = hull(low, high)
    else:
        lanes = _uniform_replay(static, axis, consts_mask, state_mask, carry_mask, xs_mask, ys_mask)
    new_carry, ys = replay(lanes, low, high, marks, *arguments)
    return [*new_carry, *ys], [*axes_of(carry_mask), *axes_of(ys_mask, 1)]


batching.fancy_primitive_batchers[replay_p] = _batch_replay
