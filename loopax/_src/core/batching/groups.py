"""Lanes whose numbers of steps are known, in groups of lanes that take similar numbers, one after another.

`core/ir/annotations.py` says how many groups there are.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lanes import Compact, group_sizes
from loopax._src.core.ir.loop import Loop, run
from loopax._src.core.ir.plan import EveryResidual
from loopax._src.core.jaxpr.types import Axis, axes_of, is_batched, refuse_sharded_lanes
from loopax._src.core.jaxpr.util import INDEX, Mask, collective_over, merge_lists, reject, select, split_list, trace
from loopax._src.jax_internals import ClosedJaxpr, keep_bits, on_device, where
from loopax._src.messages import sequential_collective_message, symbolic_lanes_message

# A batch whose lanes run one after another, each alone: a loop over lanes around the loop of one lane.
#
# No lane waits for another, and none is masked. Each takes the time that it takes without a batch, which is less than
# its share of a batch where a step is costly, and the numbers of steps differ much.


def run_sequentially(
    alone: Callable[..., Sequence[Any]],
    body: ClosedJaxpr,
    axis: Axis,
    operands: Sequence[Any],
    dims: Sequence[Any],
    results: Mask,
) -> tuple[list[Any], list[int | None]]:
    """The results of all lanes, and at which axis they have their lanes.

    `alone` takes the operands of one lane; `dims` says where operands have their lanes, None where all share one.
    `body` is what one lane evaluates: it may not communicate with others. `results` says which of the results lanes
    have of their own; all share the others.
    """
    refuse_sharded_lanes(axis)
    if collective_over(body, axis.name):
        raise NotImplementedError(sequential_collective_message(axis.name))
    if not isinstance(axis.size, int):
        raise NotImplementedError(symbolic_lanes_message(axis.size))
    mapped = is_batched(dims)
    shared = reject(mapped, operands)
    rows = [jnp.moveaxis(x, int(d), 0) for x, d in zip(select(mapped, operands), select(mapped, dims), strict=True)]
    ys = over_rows(lambda shared, own: alone(*merge_lists(mapped, shared, own)), shared, rows, "a loop over lanes")
    return [y if own else keep_bits(lambda y: y[0], y) for own, y in zip(results, ys, strict=True)], axes_of(results)


def over_rows(
    function: Callable[[list[Any], list[Any]], Sequence[Any]], shared: Sequence[Any], rows: Sequence[Any], reason: str
) -> list[Any]:
    """`function(shared, row)` of one row after another; the results have rows in front.

    There is one row at least; `reason` says why a gradient stores what all of them need.
    """

    def body(_: Any, *values: Any) -> Sequence[Any]:
        return function(*split_list(values, [len(shared)]))

    number = len(rows[0])
    loop = Loop(
        trace(body, [INDEX, *map(jax.typeof, shared), *(jax.typeof(x[0]) for x in rows)]),
        num_consts=len(shared),
        num_carry=0,
        bound=number,
        reverse=False,
        predicated=False,
        unroll=1,
        kind=Decided(EveryResidual(reason=reason)),
    )
    return list(run(loop, jnp.int32(0), jnp.int32(number), shared, [], rows).ys)


# Take lanes out of a batch.


def take(x: Any, order: Any, axis: int, unique: bool = True) -> Any:
    """These lanes, in this order; none twice, if `unique`."""

    def lanes(x: Any, order: Any) -> Any:
        return x.at[(*(slice(None),) * axis, order)].get(mode="promise_in_bounds", unique_indices=unique)

    return on_device(lambda x: keep_bits(lanes, x, order), x)


def take_mapped(values: Sequence[Any], mapped: Sequence[bool], order: Any, axis: int) -> list[Any]:
    """These lanes of values that lanes have of their own."""
    return [take(x, order, axis) if m else x for x, m in zip(values, mapped, strict=True)]


def with_rows(old: Any, new: Any, low: Any, high: Any) -> Any:
    """The rows `low ... high - 1` of `new`, the others of `old`."""
    rows = jnp.arange(old.shape[0], dtype=jnp.int32)
    chosen = (low <= rows) & (rows < high)
    return where(chosen.reshape(-1, *(1,) * (old.ndim - 1)), new, old)


def active_first(active: Any, last: Any = False) -> Any:
    """The numbers of active lanes, and then those of the others, of which some come last.

    Sorting numbers is three times as fast as `argsort`.
    """
    size = len(active)
    place = jnp.where(active, 0, jnp.where(last, 2 * size, size)).astype(jnp.int32)
    return jnp.sort(place + jnp.arange(size, dtype=jnp.int32), stable=False) % max(size, 1)


class GroupProgram(NamedTuple):
    """What runs in groups: operands are low, high, and others."""

    run_group: Callable[[int, list[Any]], list[Any]]  # (number of lanes, operands) -> results
    mapped: Mask  # which operands have an axis of lanes
    operand_axes: Sequence[int]  # where
    result_axes: Sequence[int]  # all results have one


def in_groups(program: GroupProgram, how: Compact, num_steps: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of all lanes."""
    lanes = len(num_steps)
    parts = group_sizes(how, lanes)
    if parts == [(1, lanes)]:
        return program.run_group(lanes, list(operands))
    places = sum(number * size for number, size in parts)  # those that are left repeat a lane, without its rows
    order = jnp.argsort(-num_steps).astype(jnp.int32)
    chosen = order if places == lanes else order[jnp.minimum(jnp.arange(places), lanes - 1)]
    axes = select(program.mapped, program.operand_axes)
    own = [
        _lanes_first(x, at, chosen, places == lanes)
        for x, at in zip(select(program.mapped, operands), axes, strict=True)
    ]
    rows, start, found = [jnp.arange(places) < lanes, *own], 0, []
    for number, size in parts:
        part = [_part(x, start, number, size) for x in rows]
        found.append(_map(program, number, size, reject(program.mapped, operands), part))
        start += number * size
    back = jnp.argsort(order).astype(jnp.int32)
    results = [keep_bits(lambda *parts: jnp.concatenate(parts)[:lanes], *parts) for parts in zip(*found, strict=True)]
    return [jnp.moveaxis(take(y, back, 0), 0, at) for y, at in zip(results, program.result_axes, strict=True)]


def _lanes_first(x: Any, axis: int, order: Any, unique: bool) -> Any:
    return take(jnp.moveaxis(x, axis, 0), order, 0, unique)


def _part(x: Any, start: int, number: int, size: int) -> Any:
    """Lanes as rows, one for each group."""
    lanes = keep_bits(lambda x: x[start : start + number * size], x)
    return lanes.reshape(number, size, *x.shape[1:])


def _map(program: GroupProgram, number: int, size: int, shared: list[Any], rows: list[Any]) -> list[Any]:
    """One group after another; returns results with lanes first."""
    axes = select(program.mapped, program.operand_axes)

    def group(shared: list[Any], row: list[Any]) -> list[Any]:
        is_lane, *own = row
        own = [jnp.moveaxis(x, 0, at) for x, at in zip(own, axes, strict=True)]
        low, high, *rest = merge_lists(program.mapped, shared, own)
        results = program.run_group(size, [*_windows(is_lane, program.mapped, low, high), *rest])
        return [jnp.moveaxis(y, at, 0) for y, at in zip(results, program.result_axes, strict=True)]

    ys = over_rows(group, shared, rows, "a map over groups of lanes")
    return [y.reshape(number * size, *y.shape[2:]) for y in ys]


def _windows(is_lane: Any, mapped: Mask, low: Any, high: Any) -> tuple[Any, Any]:
    """The windows of a group; a place that is left over, and repeats a lane, gets an empty one."""
    if mapped[1]:
        return low, jnp.where(is_lane, high, low)
    return jnp.where(is_lane, low, high), high
