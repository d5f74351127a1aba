"""NumPy's indices as TensorStore takes them: in bounds, and counted from the start."""

from collections.abc import Iterator, Sequence
from operator import index as to_int
from typing import Any

import numpy as np


def in_bounds(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Write an index with numbers from 0 on, slices cut to the array, and no ellipsis. IndexError as in NumPy."""
    parts = [part for one in (index if isinstance(index, tuple) else (index,)) for part in _plain(one)]
    taken = sum(part is not None and part is not ... for part in parts)
    if taken > len(shape):
        raise IndexError(f"too many indices for rows of shape {tuple(shape)}: {taken}")
    if sum(part is ... for part in parts) > 1:
        raise IndexError("an index can only have a single ellipsis (`...`)")
    if not any(part is ... for part in parts):
        parts.append(...)
    at = next(i for i, part in enumerate(parts) if part is ...)
    parts[at : at + 1] = [slice(None)] * (len(shape) - taken)
    axes = iter(range(len(shape)))
    return tuple(None if part is None else _axis(part, axis := next(axes), shape[axis]) for part in parts)


def _plain(part: Any) -> Iterator[Any]:
    """Masks as the numbers of what they pick, and lists as arrays."""
    if part is None or part is ... or isinstance(part, slice):
        yield part
        return
    array = np.asarray(part)
    if array.dtype == np.bool_ and array.ndim:
        yield from array.nonzero()
    elif np.issubdtype(array.dtype, np.integer):
        yield array if array.ndim else to_int(part)
    elif array.size == 0 and isinstance(part, list):
        yield array.astype(np.int64)
    else:
        raise IndexError(f"got {part!r} as an index of rows, expected ints, slices, `...`, or arrays of ints or bools")


def _axis(part: Any, axis: int, size: int) -> Any:
    if isinstance(part, slice):
        start, stop, step = part.indices(size)
        if step < 0:
            raise IndexError(
                "rows on disk are read forwards: take a slice with a positive step, and turn what it gives"
            )
        return slice(start, max(start, stop), step)
    low, high = (part, part) if isinstance(part, int) else (part.min(initial=0), part.max(initial=-1))
    if low < -size or high >= size:
        raise IndexError(f"index {low if low < -size else high} is out of bounds for axis {axis} with size {size}")
    return (part + size if part < 0 else part) if isinstance(part, int) else np.where(part < 0, part + size, part)
