"""Lanes whose numbers of steps are known, in groups of lanes that take similar numbers, one after another.

`ir/lane_stages.py` says how many groups there are.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from loopax._src.core.batching.compact.gather import take
from loopax._src.core.batching.sequential import over_rows
from loopax._src.core.ir.lane_stages import Stages
from loopax._src.core.jaxpr.util import Mask, merge_lists, reject, select
from loopax._src.jax_internals import keep_bits


class GroupProgram(NamedTuple):
    """What runs in groups: operands are low, high, and others."""

    run_group: Callable[[int, list[Any]], list[Any]]  # (number of lanes, operands) -> results
    mapped: Mask  # which operands have an axis of lanes
    operand_axes: Sequence[int]  # where
    result_axes: Sequence[int]  # all results have one


def in_groups(program: GroupProgram, stages: Stages, num_steps: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of all lanes."""
    lanes = len(num_steps)
    parts = stages.groups(lanes)
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
