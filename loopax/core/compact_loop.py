"""A batch of loops whose finished lanes leave it.

A batch runs until few enough lanes are left; those are gathered into a smaller batch, which goes on; in the end
results are put back in their places. Every stage is a batch in lockstep on rows of its own, so derivatives are
those of the stages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from loopax._compat import zeros
from loopax.core.axes import Axis
from loopax.core.batch import Rules
from loopax.core.compact import head, heads, put, put_head, stages_of, take, take_mapped, with_rows
from loopax.core.jaxprs import Mask, select, split, stacked
from loopax.core.lanes import hull
from loopax.core.lanes_loop import Lanes, goes_on, own_limits, run_lanes
from loopax.core.loop import UNUSED, Loop


class Results(NamedTuple):
    """Of all lanes of a batch."""

    num_steps: Any
    carry: list[Any]
    ys: list[Any]


def _run(loop: Loop, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """The program of a batch."""
    assert loop.stages is not None
    (low, high), consts, carry, xs = split(operands, [2, *loop.sizes])
    windows, mapped_consts, _, mapped_xs = (tuple(m) for m in split(mapped, [2, *loop.sizes]))
    lanes = Lanes(windows, own_limits(windows, low, high), mapped_consts, mapped_xs, consts, carry, xs)
    if loop.predicated:
        sizes = loop.stages.sizes(axis.size)
        results = _until_few_are_left(loop, axis, sizes, *hull(low, high), lanes)
    else:
        results = _on_known_rows(loop, axis, low, high, lanes)
    return [results.num_steps, *results.carry, *results.ys, *_nothing_saved(loop, axis)]


def _nothing_saved(loop: Loop, axis: Axis) -> list[Any]:
    """What a loop saves is for a sweep, and a batch of sweeps in stages saves anew (`core/compact_replay.py`)."""
    if not loop.saving:
        return []
    avals = [stacked(aval, axis.size) for aval in select(loop.saved_mask, loop.output_avals[0])]
    marks = jnp.full((axis.size, loop.saving.num_marks()), UNUSED, jnp.int32)
    return [*(zeros(stacked(aval, loop.saved_rows)) for aval in avals), marks]


def _until_few_are_left(loop: Loop, axis: Axis, sizes: Sequence[int], low: Any, high: Any, lanes: Lanes) -> Results:
    """Lanes whose predicates stop them: which go on is known only then."""
    smaller = sizes[1:]
    out, num_steps = run_lanes(loop, axis, low, high, lanes, smaller[0] if smaller else 0)
    if not smaller:
        return Results(num_steps, out.carry, out.ys)
    low, high = (low, high - out.num_steps) if loop.reverse else (low + out.num_steps, high)
    first = high - 1 if loop.reverse else low
    active = out.carry[0] & goes_on(first, lanes.own, lanes.windows, loop.reverse)
    order = jnp.argsort(~active, stable=True)[: smaller[0]].astype(jnp.int32)
    left = Lanes(
        lanes.windows,
        [take(x, order, 0) for x in lanes.own],
        lanes.mapped_consts,
        lanes.mapped_xs,
        take_mapped(lanes.consts, lanes.mapped_consts, order, 0),
        [take(x, order, 0) for x in out.carry],
        take_mapped(lanes.xs, lanes.mapped_xs, order, 1),
    )
    rest = _until_few_are_left(loop, axis.resized(smaller[0]), smaller, low, high, left)
    rows = [with_rows(take(old, order, 1), new, low, high) for old, new in zip(out.ys, rest.ys, strict=True)]
    return Results(
        num_steps.at[order].add(rest.num_steps, mode="promise_in_bounds", unique_indices=True),
        [put(x, order, new, 0) for x, new in zip(out.carry, rest.carry, strict=True)],
        [put(y, order, new, 1) for y, new in zip(out.ys, rows, strict=True)],
    )


def _on_known_rows(loop: Loop, axis: Axis, low: Any, high: Any, lanes: Lanes) -> Results:
    """Lanes whose windows are all that stops them: all stages are known at the start."""
    assert loop.stages is not None
    order, stages = stages_of(loop.stages, axis.size, low, high, lanes.windows, loop.reverse)
    sizes = [stage.size for stage in stages]
    own = heads([take(x, order, 0) for x in lanes.own], [True] * len(lanes.own), sizes, 0)
    consts = heads(take_mapped(lanes.consts, lanes.mapped_consts, order, 0), lanes.mapped_consts, sizes, 0)
    xs = heads(take_mapped(lanes.xs, lanes.mapped_xs, order, 1), lanes.mapped_xs, sizes, 1)
    carry = [take(x, order, 0) for x in lanes.carry]
    ys = [zeros(stacked(stacked(aval, axis.size), loop.bound or 0)) for aval in loop.output_avals[1]]
    for size, first, end in stages:
        part = lanes._replace(own=own[size], consts=consts[size], xs=xs[size], carry=[head(x, size, 0) for x in carry])
        out, _ = run_lanes(loop, axis.resized(size), first, end, part)
        carry = [put_head(x, new, 0) for x, new in zip(carry, out.carry, strict=True)]
        rows = [with_rows(head(y, size, 1), new, first, end) for y, new in zip(ys, out.ys, strict=True)]
        ys = [put_head(y, new, 1) for y, new in zip(ys, rows, strict=True)]
    back = jnp.argsort(order).astype(jnp.int32)
    num_steps = jnp.broadcast_to(jnp.maximum(high - low, 0), (axis.size,))
    return Results(num_steps, [take(x, back, 0) for x in carry], [take(y, back, 1) for y in ys])


def _operand_axes(loop: Loop) -> list[int]:
    carry, xs = loop.input_avals[1:]
    return [0, 0, *(0,) * loop.num_consts, *(0 for _ in carry), *(1 for _ in xs)]


def _result_axes(loop: Loop) -> list[int]:
    marks = [0] if loop.saving else []
    return [0, *(0,) * loop.num_carry, *(1 for _ in loop.output_avals[1]), *(1,) * sum(loop.saved_mask), *marks]


LOOPS = Rules(_run, _operand_axes, _result_axes)
