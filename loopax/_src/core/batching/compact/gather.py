"""Take lanes out of a batch."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from loopax._src.jax_internals import keep_bits, on_device, where


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
