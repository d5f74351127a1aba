"""Batching: `jax.vmap` of loops and of reverse sweeps.

Lanes share the row number, so rows of xs are never gathered. A lane is active while the row is in
its own window `low <= row < high` and its own predicate is True; the batch goes on until no lane is.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopax._compat import ClosedJaxpr, axis_arguments, batched_outputs, batching, collective_over, jaxpr_as_fun
from loopax._errors import collective_message
from loopax.core.dependence import spread
from loopax.core.jaxprs import Mask, either, invert, select, split, stacked, trace, weakly_cached
from loopax.core.lanes import accumulators, lane_function, skip_idle_rows, step_lanes
from loopax.core.lending import Lent, large_constants
from loopax.core.loop import Loop, lending, loop_p, run
from loopax.core.replay import Replay, lending_replay, replay, replay_p
from loopax.core.replay_jvp import reached


class Axis:
    """A mapped axis in a form that can key a cache."""

    def __init__(self, data: Any) -> None:
        """Take what matters from JAX's description of the axis."""
        self.arguments = axis_arguments(data)
        self.size: int = self.arguments["axis_size"]
        self._key = tuple(self.arguments.items())

    def __hash__(self) -> int:
        """By value."""
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        """By value."""
        return isinstance(other, Axis) and self._key == other._key


def _move(x: Any, dim: Any, to: int) -> Any:
    return x if dim is None else jnp.moveaxis(x, int(dim), to)


def _fill(axis: Axis, x: Any, dim: Any, to: int = 0) -> Any:
    """With the mapped axis at `to`, also where there was none."""
    if dim is not None:
        return jnp.moveaxis(x, int(dim), to)
    x = jnp.expand_dims(x, to)
    return jnp.broadcast_to(x, (*x.shape[:to], axis.size, *x.shape[to + 1 :]))


def _is_batched(dims: Sequence[Any]) -> Mask:
    return tuple(d is not None for d in dims)


def _axes(mask: Sequence[bool], axis: int = 0) -> list[int | None]:
    return [axis if batched else None for batched in mask]


def _lane_avals(avals: Sequence[Any], batched: Sequence[bool], axis: Axis) -> list[Any]:
    return [stacked(a, axis.size) if b else a for a, b in zip(avals, batched, strict=True)]


def _uniform(body: ClosedJaxpr, axis: Axis, inputs: Sequence[bool], outputs: Sequence[bool]) -> ClosedJaxpr:
    """The body for all lanes at once, where all take the same steps."""
    mapped = jax.vmap(jaxpr_as_fun(body), in_axes=(None, *_axes(inputs)), out_axes=_axes(outputs), **axis.arguments)
    return trace(mapped, [body.in_avals[0], *_lane_avals(body.in_avals[1:], inputs, axis)])


@weakly_cached
def _uniform_loop(loop: Loop, axis: Axis, consts: Mask, carry: Mask, xs: Mask, ys: Mask) -> Loop:
    return loop._replace(body=_uniform(loop.body, axis, (*consts, *carry, *xs), (*carry, *ys)))


@weakly_cached
def _lanes_loop(loop: Loop, axis: Axis, consts: Mask, xs: Mask, windows: Mask) -> Loop:
    """Lanes with windows or predicates of their own.

    consts: [lows], [highs], *consts; carry: [any lane goes on, steps of each lane], *carry.
    """
    if collective_over(loop.body, axis.arguments["axis_name"]):
        raise NotImplementedError(collective_message(axis.arguments["axis_name"]))
    batched = (*consts, *(True,) * loop.num_carry, *xs)
    function = lane_function(loop.body, batched, axis.arguments)
    const_avals = _lane_avals(loop.input_avals[0], consts, axis)
    large = large_constants(const_avals, consts)
    borrowed = _borrowed(loop.body, consts, large, loop.num_carry, xs)
    num_windows, num_extra = sum(windows), 2 if loop.predicated else 0
    start_batched = windows[1] if loop.reverse else windows[0]
    may_idle = all(windows) or (loop.predicated and start_batched)
    y_avals = [stacked(a, axis.size) for a in loop.output_avals[1]]

    def active_at(row: Any, window: Sequence[Any], carry: Sequence[Any]) -> Any:
        active = _in_window(row, window, windows, axis)
        return active & carry[0] if loop.predicated else active

    def activity(row: Any, *operands: Any) -> list[Any]:
        window, _, _, carry = split(operands, [num_windows, loop.num_consts, num_extra])
        return [active_at(row, window, carry)]

    def body(row: Any, *operands: Any) -> list[Any]:
        window, consts, extra, carry, xs = split(operands, [num_windows, loop.num_consts, num_extra, loop.num_carry])
        active = active_at(row, window, carry)

        def step() -> list[Any]:
            return step_lanes(function, active, row, [*consts, *carry, *xs], borrowed, carry)

        out = skip_idle_rows(step, active, carry, y_avals) if may_idle else step()
        if loop.predicated:
            ahead = _goes_on(row - 1 if loop.reverse else row + 1, window, windows, loop.reverse)
            extra = [jnp.any(out[0] & ahead), extra[1] + active.astype(jnp.int32)]
        return [*extra, *out]

    carry_avals, xs_avals = loop.input_avals[1:]
    extra_avals = [jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((axis.size,), jnp.int32)][:num_extra]
    avals = [
        loop.body.in_avals[0],
        *[jax.ShapeDtypeStruct((axis.size,), jnp.int32)] * num_windows,
        *const_avals,
        *extra_avals,
        *_lane_avals(carry_avals, [True] * loop.num_carry, axis),
    ]
    return loop._replace(
        body=trace(body, [*avals, *_lane_avals(xs_avals, xs, axis)]),
        lent=Lent(trace(activity, avals), (False,) * num_windows + large) if any(large) else None,
        num_consts=loop.num_consts + num_windows,
        num_carry=loop.num_carry + num_extra,
        saved=loop.saved and ((False,) * num_extra + loop.saved),
    )


def _borrowed(body: ClosedJaxpr, consts: Mask, lent: Mask, num_carry: int, rest: Mask) -> Mask:
    """Which operands of a body finished lanes borrow in each step."""
    own = accumulators(body, range(1 + len(consts), 1 + len(consts) + num_carry))
    return (*(b and not large for b, large in zip(consts, lent, strict=True)), *invert(own), *rest)


def _in_window(row: Any, window: Sequence[Any], windows: Mask, axis: Axis) -> Any:
    """Which lanes have this row in their window; a bound that all share needs no test."""
    active = jnp.ones(axis.size, bool)
    if windows[0]:
        active &= window[0] <= row
    if windows[1]:
        active &= row < window[sum(windows) - 1]
    return active


def _goes_on(row: Any, window: Sequence[Any], windows: Mask, reverse: bool) -> Any:
    """Which lanes have rows from `row` on, also ones that have not started; True where all share a bound."""
    if all(windows):
        low, high = window
        return (low < high) & ((low <= row) if reverse else (row < high))
    if reverse and windows[0]:
        return window[0] <= row
    if not reverse and windows[1]:
        return row < window[-1]
    return True


def _batch_loop(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    loop, axis = lending(Loop(**params)), Axis(axis_data)
    (low, high), *groups = split(operands, [2, *loop.sizes])
    window_dims, *group_dims = split(dims, [2, *loop.sizes])
    consts, carry, xs = groups
    const_dims, carry_dims, x_dims = group_dims
    consts = [_move(x, d, 0) for x, d in zip(consts, const_dims, strict=True)]
    xs = [_move(x, d, 1) for x, d in zip(xs, x_dims, strict=True)]
    consts_mask, xs_mask, windows = _is_batched(const_dims), _is_batched(x_dims), _is_batched(window_dims)
    carry_mask, ys_mask = _batched_results(loop, axis_data, consts_mask, _is_batched(carry_dims), xs_mask)
    if any(windows) or (loop.predicated and carry_mask[0]):
        carry = [_fill(axis, x, d) for x, d in zip(carry, carry_dims, strict=True)]
        return _batch_lanes(loop, axis, (low, high), windows, consts, carry, xs, (consts_mask, xs_mask))

    uniform = _uniform_loop(loop, axis, consts_mask, carry_mask, xs_mask, ys_mask)
    carry = [_fill(axis, x, d) if b else x for x, d, b in zip(carry, carry_dims, carry_mask, strict=True)]
    out = run(uniform, low, high, consts, carry, xs)
    out_dims = [
        None,
        *_axes(carry_mask),
        *_axes(ys_mask, 1),
        *_axes(select(loop.saved_mask, carry_mask), 1),
    ]
    return [out.num_steps, *out.carry, *out.ys, *out.saved], out_dims


def _batched_results(loop: Loop, axis_data: Any, consts: Mask, carry: Mask, xs: Mask) -> tuple[Mask, Mask]:
    """Which leaves of the carry and which ys are batched."""
    if not collective_over(loop.body, axis_arguments(axis_data)["axis_name"]):
        flags = spread(loop.body, (False, *consts, *carry, *xs), loop.carry_range)
        reached, ys = split(flags, [loop.num_carry])
        return tuple(reached), tuple(ys)
    while True:  # what has passed through a collective may be the same in all lanes again
        flags = batched_outputs(loop.body, axis_data, [False, *consts, *carry, *xs])
        new, ys = split(flags, [loop.num_carry])
        if either(carry, new) == carry:
            return carry, tuple(ys)
        carry = either(carry, new)


def _batch_lanes(
    loop: Loop,
    axis: Axis,
    window: tuple[Any, Any],
    windows: Mask,
    consts: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
    masks: tuple[Mask, Mask],
) -> Any:
    lanes = _lanes_loop(loop, axis, *masks, windows)
    low, high = window
    extra = []
    if loop.predicated:
        some = jnp.any(carry[0] & (low < high))
        extra = [some, jnp.zeros(axis.size, jnp.int32)]
    out = run(lanes, *_hull(low, high), [*select(windows, (low, high)), *consts], [*extra, *carry], xs)
    extra, new_carry = split(out.carry, [len(extra)])
    num_steps = extra[1] if loop.predicated else jnp.broadcast_to(jnp.maximum(high - low, 0), (axis.size,))
    results = [num_steps, *new_carry, *out.ys, *out.saved]
    return results, [0, *(0 for _ in new_carry), *(1 for _ in out.ys), *(1 for _ in out.saved)]


def _hull(low: Any, high: Any) -> tuple[Any, Any]:
    """The window that holds those of all lanes; empty where there are no lanes."""
    empty = jnp.zeros((), jnp.int32)
    return (jnp.min(low) if jnp.size(low) else empty), (jnp.max(high) if jnp.size(high) else empty)


batching.fancy_primitive_batchers[loop_p] = _batch_loop


@weakly_cached
def _uniform_replay(static: Replay, axis: Axis, consts: Mask, state: Mask, carry: Mask, xs: Mask, ys: Mask) -> Replay:
    forward_inputs = (*consts, *state, *xs[: static.num_forward_xs])
    return static._replace(
        forward=_uniform(static.forward, axis, forward_inputs, state),
        backward=_uniform(static.backward, axis, (*consts, *carry, *state, *xs), (*carry, *ys)),
    )


@weakly_cached
def _lanes_replay(static: Replay, axis: Axis, consts: Mask, xs: Mask, windows: Mask) -> Replay:
    """Both bodies for lanes with windows of their own: consts are [lows], [highs], *consts."""
    avals, forward_avals = static.backward_avals, static.forward_avals
    state, carry = (True,) * static.num_state, (True,) * static.num_carry
    front = xs[: static.num_forward_xs]
    const_avals = _lane_avals(avals[0], consts, axis)
    large = large_constants(const_avals, consts)
    groups = [(consts, avals[0]), (state, forward_avals[1]), (front, forward_avals[2])]
    forward = _lanes_body(static.forward, axis, windows, large, groups)
    groups = [(consts, avals[0]), (carry, avals[1]), ((*state, *xs), avals[2] + avals[3])]
    backward = _lanes_body(static.backward, axis, windows, large, groups)

    def activity(row: Any, *consts: Any) -> list[Any]:
        return [_in_window(row, consts, windows, axis)]

    window_avals = [jax.ShapeDtypeStruct((axis.size,), jnp.int32)] * sum(windows)
    lent = None
    if any(large):
        traced = trace(activity, [static.forward.in_avals[0], *window_avals, *const_avals])
        lent = Lent(traced, (False,) * len(window_avals) + large)
    num_consts = static.num_consts + len(window_avals)
    return static._replace(forward=forward, backward=backward, num_consts=num_consts, lent=lent)


def _lanes_body(
    closed: ClosedJaxpr, axis: Axis, windows: Mask, lent: Mask, groups: Sequence[tuple[Mask, Sequence[Any]]]
) -> ClosedJaxpr:
    """A body (row, *consts, *carry, *rest) -> (*carry, *y) for lanes with windows of their own."""
    batched = [flag for mask, _ in groups for flag in mask]
    function = lane_function(closed, batched, axis.arguments)
    num_consts, num_carry = len(groups[0][0]), len(groups[1][0])
    borrowed = _borrowed(closed, groups[0][0], lent, num_carry, groups[2][0])
    y_avals = [stacked(a, axis.size) for a in closed.out_avals[num_carry:]]

    def body(row: Any, *operands: Any) -> list[Any]:
        window, consts, carry, rest = split(operands, [sum(windows), num_consts, num_carry])
        active = _in_window(row, window, windows, axis)

        def step() -> list[Any]:
            return step_lanes(function, active, row, [*consts, *carry, *rest], borrowed, carry)

        return skip_idle_rows(step, active, carry, y_avals) if all(windows) else step()

    lanes = [aval for mask, group in groups for aval in _lane_avals(group, mask, axis)]
    window_avals = [jax.ShapeDtypeStruct((axis.size,), jnp.int32)] * sum(windows)
    return trace(body, [closed.in_avals[0], *window_avals, *lanes])


def _batch_replay(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    static, axis = lending_replay(Replay(**params)), Axis(axis_data)
    (low, high), consts, init, saved, carry, xs = split(operands, [2, *static.sizes])
    window_dims, const_dims, init_dims, saved_dims, carry_dims, x_dims = split(dims, [2, *static.sizes])
    consts_mask, xs_mask, windows = _is_batched(const_dims), _is_batched(x_dims), _is_batched(window_dims)
    started = tuple(a is not None or b is not None for a, b in zip(init_dims, saved_dims, strict=True))
    state_mask, carry_mask, ys_mask = reached(
        static, consts_mask, started, _is_batched(carry_dims), xs_mask, typed=False
    )
    if any(windows):
        state_mask, carry_mask, ys_mask = ((True,) * len(m) for m in (state_mask, carry_mask, ys_mask))

    def fill(mask: Mask, values: Sequence[Any], value_dims: Sequence[Any], to: int) -> list[Any]:
        return [_fill(axis, x, d, to) if b else x for b, x, d in zip(mask, values, value_dims, strict=True)]

    arguments = [
        [_move(x, d, 0) for x, d in zip(consts, const_dims, strict=True)],
        fill(state_mask, init, init_dims, 0),
        fill(state_mask, saved, saved_dims, 1),
        fill(carry_mask, carry, carry_dims, 0),
        [_move(x, d, 1) for x, d in zip(xs, x_dims, strict=True)],
    ]
    if any(windows):
        lanes = _lanes_replay(static, axis, consts_mask, xs_mask, windows)
        arguments[0] = [*select(windows, (low, high)), *arguments[0]]
        low, high = _hull(low, high)
    else:
        lanes = _uniform_replay(static, axis, consts_mask, state_mask, carry_mask, xs_mask, ys_mask)
    new_carry, ys = replay(lanes, low, high, *arguments)
    return [*new_carry, *ys], [*_axes(carry_mask), *_axes(ys_mask, 1)]


batching.fancy_primitive_batchers[replay_p] = _batch_replay
