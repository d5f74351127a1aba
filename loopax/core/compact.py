"""What the ways to run a batch in stages have in common: who takes part in a stage, and on which rows.

Where the windows of all lanes are known at the start, lanes are sorted, and a stage is the first so many of them
on some rows. Those that end last come first: stages get smaller. Where they start at different rows and
end together (a scan in reverse), those that start first come first, and stages get larger.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax.core.jaxprs import Mask
from loopax.core.lanes import hull
from loopax.schedule import Stages


class Stage(NamedTuple):
    """The first `size` lanes on the rows `low ... high - 1`."""

    size: int
    low: Any
    high: Any


def stages_of(stages: Stages, lanes: int, low: Any, high: Any, windows: Mask, reverse: bool) -> tuple[Any, list[Stage]]:
    """An order of lanes, and the stages in the order in which the rows are walked."""
    sizes = stages.sizes(lanes)
    if len(sizes) == 1:
        return jnp.arange(lanes, dtype=jnp.int32), [Stage(lanes, *hull(low, high))]
    # In time, which runs forward: a row r is walked at r, or in reverse at -r - 1.
    start, end = (-high, -low) if reverse else (low, high)
    ends_differ = windows[0] if reverse else windows[1]
    order, spans = (_shrinking if ends_differ else _growing)(sizes, start, end)
    return order, [Stage(m, -b, -a) if reverse else Stage(m, a, b) for m, a, b in spans]


def _shrinking(sizes: Sequence[int], start: Any, end: Any) -> tuple[Any, list[tuple[int, Any, Any]]]:
    order = jnp.argsort(-end)
    ends, now, spans = end[order], jnp.min(start), []
    for i, size in enumerate(sizes):
        last = ends[sizes[i + 1] if i + 1 < len(sizes) else 0]
        until = jnp.maximum(now, last)
        spans.append((size, now, until))
        now = until
    return order.astype(jnp.int32), spans


def _growing(sizes: Sequence[int], start: Any, end: Any) -> tuple[Any, list[tuple[int, Any, Any]]]:
    order = jnp.argsort(start)
    starts, spans = jnp.minimum(start[order], end), []
    now = starts[0]
    for i, size in enumerate(reversed(sizes)):
        until = starts[size] if i + 1 < len(sizes) else end
        spans.append((size, now, until))
        now = until
    return order.astype(jnp.int32), spans


def take(x: Any, order: Any, axis: int) -> Any:
    """These lanes, in this order."""
    index = (*(slice(None),) * axis, order)
    return x.at[index].get(mode="promise_in_bounds", unique_indices=True)


def take_mapped(values: Sequence[Any], mapped: Sequence[bool], order: Any, axis: int) -> list[Any]:
    """These lanes of values that lanes have of their own."""
    return [take(x, order, axis) if m else x for x, m in zip(values, mapped, strict=True)]


def put(x: Any, order: Any, new: Any, axis: int) -> Any:
    """The inverse: `x` with these lanes replaced."""
    index = (*(slice(None),) * axis, order)
    return x.at[index].set(new, mode="promise_in_bounds", unique_indices=True)


def head(x: Any, size: int, axis: int) -> Any:
    """The first lanes."""
    return lax.slice_in_dim(x, 0, size, axis=axis)


def put_head(x: Any, new: Any, axis: int) -> Any:
    """With the first lanes replaced."""
    return lax.dynamic_update_slice_in_dim(x, new, 0, axis)


def with_rows(old: Any, new: Any, low: Any, high: Any) -> Any:
    """The rows `low ... high - 1` of `new`, the others of `old`."""
    rows = jnp.arange(old.shape[0], dtype=jnp.int32)
    walked = (low <= rows) & (rows < high)
    return jnp.where(walked.reshape(-1, *(1,) * (old.ndim - 1)), new, old)


def heads(values: Sequence[Any], mapped: Sequence[bool], sizes: Sequence[int], axis: int) -> dict[int, list[Any]]:
    """For every size the first lanes of all values, each taken from those of the next larger size.

    So the derivative adds up arrays that get smaller, too.
    """
    found, current = {}, list(values)
    for size in sorted(set(sizes), reverse=True):
        current = [
            head(x, size, axis) if m and x.shape[axis] != size else x for x, m in zip(current, mapped, strict=True)
        ]
        found[size] = current
    return found
