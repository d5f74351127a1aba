"""A batch of loops that stop at different steps, in lockstep.

Lanes share the row number, so rows of xs are never gathered. A lane is active while the row is in
its own window `low <= row < high` and its own predicate is True; the batch goes on until no lane is, or
until no more than some are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src.core.batching.masked_step import (
    filled_operands,
    in_window,
    lane_function,
    lanes_body,
    skip_idle_rows,
    step_lanes,
    when_filled,
)
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, Outcome, run
from loopax._src.core.jaxpr.mapped_axis import Axis, axes_of, fill_axis, lane_avals
from loopax._src.core.jaxpr.operand_groups import flatten, map_leaves
from loopax._src.core.jaxpr.properties import is_elementwise
from loopax._src.core.jaxpr.util import Mask, collective_over, select, split_list, stacked, trace, weakly_cached
from loopax._src.core.masking.substitute import fill_inactive
from loopax._src.core.row_buffers.versions import buffers
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun, vary_like
from loopax._src.messages import collective_message


class LaneOperands(NamedTuple):
    """The operands of a batch; those that lanes have of their own have an axis of lanes, rows of xs a second one."""

    windows: Mask  # whether lanes have a low and a high of their own
    own: list[Any]  # these
    mapped: LoopInputs  # which other operands lanes have of their own; each leaf of the carry
    inputs: LoopInputs


def result_axes(loop: Loop, num_steps: Any, checkpoint_rows: Any, batched: LoopOutputs | None = None) -> Outcome:
    """At which axis each result has its lanes, None where it has none: lanes stand behind the rows of ys and saved.

    `num_steps` and `checkpoint_rows` are their own answers. `batched` says which outputs have lanes; None: all.
    """
    results = loop.results_from(num_steps, batched or map_leaves(lambda _: True, loop.output_avals), checkpoint_rows)
    return results._replace(carry=axes_of(results.carry), ys=axes_of(results.ys, 1), saved=axes_of(results.saved, 1))


def more_than(leave: int, active: Any) -> Any:
    """Whether more lanes than these are active."""
    return jnp.sum(active, dtype=jnp.int32) > leave if leave else jnp.any(active)


def goes_on(row: Any, own: Sequence[Any], windows: Mask, reverse: bool) -> Any:
    """Which lanes have rows from `row` on, also ones that have not started; True where all share a bound."""
    if all(windows):
        low, high = own
        return (low < high) & ((low <= row) if reverse else (row < high))
    if reverse and windows[0]:
        return own[0] <= row
    if not reverse and windows[1]:
        return row < own[-1]
    return True


def takes_any_step(loop: Loop) -> bool:
    """Whether a batch computes the one step of a loop for all lanes, and drops it where it is not taken."""
    return loop.may_discard or (loop.bound == 1 and not loop.predicated and is_elementwise(loop.body))


def _summary(loop: Loop, axis: Axis, leave: int, carry: Sequence[Any], ahead: Any) -> list[Any]:
    """Whether the batch goes on, where it has a predicate, and how many lanes do, where it shows that."""
    go_on = carry[0] & ahead if loop.predicated else ahead
    goes_on = [more_than(leave, go_on)] if loop.predicated else []
    if loop.reporting is None:
        return goes_on
    # Where each lane is a batch that counts its own lanes, these are counted.
    counts = jnp.ones(axis.size, jnp.int32) if loop.active_count_index is None else carry[loop.active_count_index]
    return [*goes_on, jnp.sum(jnp.where(go_on, counts, 0), dtype=jnp.int32)]


@weakly_cached
def _lanes_loop(
    loop: Loop, axis: Axis, mapped: LoopInputs, windows: Mask, avals: tuple[tuple[Any, ...], ...], leave: int
) -> Loop:
    """Consts: [lows], [highs], *consts; carry: [whether the batch goes on], [lanes that do], [steps of each], *carry.

    The number of lanes that go on is there where the loop shows it.
    """
    if collective_over(loop.body, axis.name):
        raise NotImplementedError(collective_message(axis.name))
    window_avals, extra = avals
    const_avals, carry_avals, xs_avals = (
        lane_avals(group, mask, axis) for group, mask in zip(loop.input_avals, mapped, strict=True)
    )
    may_discard = takes_any_step(loop)
    when = "never" if may_discard else when_filled(loop.body)
    has_lanes = map_leaves(lambda _: True, mapped) if may_discard else mapped
    function = lane_function(loop.body, flatten(has_lanes), axis.arguments)
    in_place = buffers(loop.body, loop.carry_range)
    filled_consts, filled_others = filled_operands(loop.body, has_lanes.consts, loop.num_carry, has_lanes.xs)
    num_windows, num_extra = len(window_avals), len(extra)
    start_batched = windows[1] if loop.reverse else windows[0]
    may_idle = all(windows) or (loop.predicated and start_batched)
    y_avals = [stacked(a, axis.size) for a in loop.output_avals.ys]

    def active_at(row: Any, own: Sequence[Any], carry: Sequence[Any]) -> Any:
        active = in_window(row, own, windows, axis)
        return active & carry[0] if loop.predicated else active

    def body(row: Any, *operands: Any) -> list[Any]:
        own, consts, extra, carry, xs = split_list(operands, [num_windows, loop.num_consts, num_extra, loop.num_carry])
        active = active_at(row, own, carry)
        if may_discard:
            consts, xs = _repeated(axis, consts, mapped.consts), _repeated(axis, xs, mapped.xs)
        filled = fill_inactive(active, consts, filled_consts, when)

        def step(carry: Sequence[Any]) -> list[Any]:
            return step_lanes(function, active, row, filled, [*carry, *xs], filled_others, carry, in_place, when)

        out = skip_idle_rows(loop.body, step, active, carry, y_avals) if may_idle else step(carry)
        if not num_extra:
            return out
        ahead = goes_on(row - 1 if loop.reverse else row + 1, own, windows, loop.reverse)
        taken = [extra[-1] + active.astype(jnp.int32)] if loop.predicated else []
        return [*_summary(loop, axis, leave, out, ahead), *taken, *out]

    reporting = loop.reporting and loop.reporting._replace(counts_lanes=True)
    return loop._replace(
        reporting=reporting,
        inverse=loop.inverse and _lanes_inverse(loop, axis, mapped, windows, window_avals, extra),
        body=trace(body, [loop.body.in_avals[0], *window_avals, *const_avals, *extra, *carry_avals, *xs_avals]),
        num_consts=loop.num_consts + num_windows,
        num_carry=loop.num_carry + num_extra,
        saved=loop.saved and ((False,) * num_extra + loop.saved),
        stages=None,
        may_discard=may_discard,
        debug_info=loop.debug_info and loop.debug_info.in_lockstep(axis.size, num_windows, num_extra),
    )


def _repeated(axis: Axis, operands: Sequence[Any], mapped: Sequence[bool]) -> list[Any]:
    """What all lanes share, for each of them: its derivative is masked in each lane, and then summed."""
    return [x if has_lanes else fill_axis(axis, x, None) for x, has_lanes in zip(operands, mapped, strict=True)]


def _lanes_inverse(
    loop: Loop, axis: Axis, mapped: LoopInputs, windows: Mask, window_avals: Sequence[Any], extra: Sequence[Any]
) -> ClosedJaxpr:
    """The inverse for such lanes: one that has not taken the step keeps its carry.

    Where a lane has a predicate, its number of steps says which rows it has walked: the number stays what it is.
    """
    assert loop.inverse is not None
    walked, walked_avals = windows, list(window_avals)
    if loop.predicated:
        walked, walked_avals = (True, True), [extra[-1], extra[-1]]
    groups = [tuple(mapped.consts), tuple(mapped.carry), tuple(mapped.xs)]
    inverse = lanes_body(loop.inverse, axis, walked, tuple(walked_avals), groups)
    back = jaxpr_as_fun(inverse)
    _, *avals = inverse.in_avals
    _, const_avals, carry_avals, xs_avals = split_list(avals, [len(walked_avals), loop.num_consts, loop.num_carry])

    def body(row: Any, *operands: Any) -> list[Any]:
        own, consts, extra_after, carry, xs = split_list(
            operands, [len(window_avals), loop.num_consts, len(extra), loop.num_carry]
        )
        if not loop.predicated:
            return [*extra_after, *back(row, *own, *consts, *carry, *xs)]
        taken = extra_after[-1]
        low, high = (own[-1] - taken, own[-1]) if loop.reverse else (own[0], own[0] + taken)
        goes_on = jnp.ones_like(extra_after[0])
        return [goes_on, *extra_after[1:], *back(row, low, high, *consts, *carry, *xs)]

    return trace(body, [loop.body.in_avals[0], *window_avals, *const_avals, *extra, *carry_avals, *xs_avals])


def _with_own_start(lanes: LaneOperands, axis: Axis, first: Any, place: int) -> LaneOperands:
    """The lanes with a first row of their own: `low`, or `high` where rows are walked from the last."""
    if lanes.windows[place]:
        return lanes
    windows = tuple(own or i == place for i, own in enumerate(lanes.windows))
    start = jnp.broadcast_to(first, (axis.size,))
    return lanes._replace(windows=windows, own=[*lanes.own, start] if place else [start, *lanes.own])


def run_lanes(loop: Loop, axis: Axis, low: Any, high: Any, lanes: LaneOperands, leave: int = 0) -> tuple[Outcome, Any]:
    """Walk the rows `low ... high - 1`; also returns the steps of each lane (None without a predicate).

    Lanes with a predicate stop when no more than `leave` of them go on.
    """
    extra = []
    if loop.predicated and loop.inverse is not None:
        lanes = _with_own_start(lanes, axis, high if loop.reverse else low, int(loop.reverse))
    if loop.predicated or loop.reporting is not None:
        first = high - 1 if loop.reverse else low
        ahead = goes_on(first, lanes.own, lanes.windows, loop.reverse)
        extra = _summary(loop, axis, leave, lanes.inputs.carry, ahead)
    if loop.predicated:
        extra.append(fill_axis(axis, vary_like(jnp.int32(0), jax.typeof(extra[0])), None))
    avals = tuple(tuple(jax.typeof(x) for x in group) for group in (lanes.own, extra))
    batch = _lanes_loop(loop, axis, LoopInputs(*map(tuple, lanes.mapped)), lanes.windows, avals, leave)
    consts, carry, xs = lanes.inputs
    out = run(batch, low, high, [*lanes.own, *consts], [*extra, *carry], xs)
    extra, carry = split_list(out.carry, [len(extra)])
    return out._replace(carry=carry), extra[-1] if loop.predicated else None


def own_limits(windows: Mask, low: Any, high: Any) -> list[Any]:
    """Those of the two that lanes have of their own."""
    return select(windows, (low, high))
