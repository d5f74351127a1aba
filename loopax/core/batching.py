"""Batching: `jax.vmap` of loops.

Lanes share the row number, so rows of xs are never gathered. A lane is active while the row is in
its own window `low <= row < high` and its own predicate is True; the batch goes on until no lane is.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopax._compat import axis_arguments, batched_outputs, batching, collective_over, vary_like
from loopax._errors import collective_message
from loopax.core.axes import Axis, axes_of, fill_axis, is_batched, lane_avals, move, uniform_body
from loopax.core.dependence import spread
from loopax.core.jaxprs import Mask, either, select, split, stacked, trace, weakly_cached
from loopax.core.lanes import borrowed_operands, hull, in_window, lane_function, skip_idle_rows, step_lanes
from loopax.core.lending import Lent, large_constants
from loopax.core.loop import Loop, lending, loop_p, run


@weakly_cached
def _uniform_loop(loop: Loop, axis: Axis, consts: Mask, carry: Mask, xs: Mask, ys: Mask) -> Loop:
    return loop._replace(body=uniform_body(loop.body, axis, (*consts, *carry, *xs), (*carry, *ys)))


@weakly_cached
def _lanes_loop(
    loop: Loop, axis: Axis, consts: Mask, xs: Mask, windows: Mask, window_avals: tuple[Any, ...], extra: tuple[Any, ...]
) -> Loop:
    """Lanes with windows or predicates of their own.

    consts: [lows], [highs], *consts; carry: [any lane goes on, steps of each lane], *carry.
    """
    if collective_over(loop.body, axis.arguments["axis_name"]):
        raise NotImplementedError(collective_message(axis.arguments["axis_name"]))
    batched = (*consts, *(True,) * loop.num_carry, *xs)
    function = lane_function(loop.body, batched, axis.arguments)
    const_avals = lane_avals(loop.input_avals[0], consts, axis)
    large = large_constants(const_avals, consts)
    borrowed = borrowed_operands(loop.body, consts, large, loop.num_carry, xs)
    num_windows, num_extra = len(window_avals), len(extra)
    start_batched = windows[1] if loop.reverse else windows[0]
    may_idle = all(windows) or (loop.predicated and start_batched)
    y_avals = [stacked(a, axis.size) for a in loop.output_avals[1]]

    def active_at(row: Any, window: Sequence[Any], carry: Sequence[Any]) -> Any:
        active = in_window(row, window, windows, axis)
        return active & carry[0] if loop.predicated else active

    def activity(row: Any, *operands: Any) -> list[Any]:
        window, _, _, carry = split(operands, [num_windows, loop.num_consts, num_extra])
        return [active_at(row, window, carry)]

    def body(row: Any, *operands: Any) -> list[Any]:
        window, consts, counts, carry, xs = split(operands, [num_windows, loop.num_consts, num_extra, loop.num_carry])
        active = active_at(row, window, carry)

        def step() -> list[Any]:
            return step_lanes(function, active, row, [*consts, *carry, *xs], borrowed, carry)

        out = skip_idle_rows(step, active, carry, y_avals) if may_idle else step()
        if loop.predicated:
            ahead = _goes_on(row - 1 if loop.reverse else row + 1, window, windows, loop.reverse)
            counts = [jnp.any(out[0] & ahead), counts[1] + active.astype(jnp.int32)]
        return [*counts, *out]

    carry_avals, xs_avals = loop.input_avals[1:]
    avals = [
        loop.body.in_avals[0],
        *window_avals,
        *const_avals,
        *extra,
        *lane_avals(carry_avals, [True] * loop.num_carry, axis),
    ]
    return loop._replace(
        body=trace(body, [*avals, *lane_avals(xs_avals, xs, axis)]),
        lent=Lent(trace(activity, avals), (False,) * num_windows + large) if any(large) else None,
        num_consts=loop.num_consts + num_windows,
        num_carry=loop.num_carry + num_extra,
        saved=loop.saved and ((False,) * num_extra + loop.saved),
    )


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
    consts = [move(x, d, 0) for x, d in zip(consts, const_dims, strict=True)]
    xs = [move(x, d, 1) for x, d in zip(xs, x_dims, strict=True)]
    consts_mask, xs_mask, windows = is_batched(const_dims), is_batched(x_dims), is_batched(window_dims)
    carry_mask, ys_mask = _batched_results(loop, axis_data, consts_mask, is_batched(carry_dims), xs_mask)
    if any(windows) or (loop.predicated and carry_mask[0]):
        carry = [fill_axis(axis, x, d) for x, d in zip(carry, carry_dims, strict=True)]
        return _batch_lanes(loop, axis, (low, high), windows, consts, carry, xs, (consts_mask, xs_mask))

    uniform = _uniform_loop(loop, axis, consts_mask, carry_mask, xs_mask, ys_mask)
    carry = [fill_axis(axis, x, d) if b else x for x, d, b in zip(carry, carry_dims, carry_mask, strict=True)]
    out = run(uniform, low, high, consts, carry, xs)
    out_dims = [
        None,
        *axes_of(carry_mask),
        *axes_of(ys_mask, 1),
        *axes_of(select(loop.saved_mask, carry_mask), 1),
        *(None for _ in out.marks),
    ]
    return [out.num_steps, *out.carry, *out.ys, *out.saved, *out.marks], out_dims


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
    low, high = window
    own = select(windows, (low, high))
    extra = []
    if loop.predicated:
        some = jnp.any(carry[0] & (low < high))
        extra = [some, vary_like(jnp.zeros(axis.size, jnp.int32), jax.typeof(some))]
    avals = (tuple(jax.typeof(x) for x in group) for group in (own, extra))
    lanes = _lanes_loop(loop, axis, *masks, windows, *avals)
    out = run(lanes, *hull(low, high), [*own, *consts], [*extra, *carry], xs)
    extra, new_carry = split(out.carry, [len(extra)])
    num_steps = extra[1] if loop.predicated else jnp.broadcast_to(jnp.maximum(high - low, 0), (axis.size,))
    results = [num_steps, *new_carry, *out.ys, *out.saved, *out.marks]
    dims = [0, *(0 for _ in new_carry), *(1 for _ in out.ys), *(1 for _ in out.saved), *(None for _ in out.marks)]
    return results, dims


batching.fancy_primitive_batchers[loop_p] = _batch_loop
