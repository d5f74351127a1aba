"""Arrays of outputs on disk, in Zarr's format (version 2), which TensorStore writes and any Zarr library reads."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from operator import index as to_int
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loopax._src.durable.checksums import DESCRIPTION, METADATA, Description, Pieces, damaged, zarr_metadata
from loopax._src.durable.options import tensorstore

# Which rows of outputs belong to which steps of a scan.


class RowPlan(NamedTuple):
    """Where the outputs of a scan stand."""

    capacity: int
    first: int  # the row of the first step
    reverse: bool

    @property
    def direction(self) -> int:
        """From the row of a step to that of the next."""
        return -1 if self.reverse else 1

    def of_step(self, steps: int) -> int:
        """The row of the step that comes after so many."""
        return self.first + self.direction * steps

    def lowest(self, steps: int, some: int) -> int:
        """The lowest row of some steps that come after so many."""
        return self.of_step(steps + some - 1 if self.reverse else steps)

    def taken(self, steps: int) -> tuple[int, int]:
        """The rows of so many first steps, from and to."""
        low = self.lowest(0, steps)
        return low, low + steps


# NumPy's indices as TensorStore takes them: in bounds, and counted from the start.


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


PIECE_BYTES = 1 << 20  # of one stored piece of an array
_FEW_ROWS = 1024  # a piece has not fewer for want of rows: there may be more when the run is resumed


def create(path: Path, description: Description, shape: Sequence[int], dtype: Any, fill: int = 0) -> None:
    """Make an array of zeros, or of `fill`, in the place of what a run has left that was never saved.

    It takes no room.
    """
    some = max(min(PIECE_BYTES // max(_row_bytes(shape, dtype), 1), max(shape[0], _FEW_ROWS)), 1)
    metadata = {
        "shape": list(shape),
        "chunks": [some, *(max(size, 1) for size in shape[1:])],
        "dtype": _zarr_dtype(np.dtype(dtype)),
        "fill_value": fill or _zero(np.dtype(dtype)),
        "compressor": None,
    }
    tensorstore().open(_spec(path) | {"metadata": metadata}, create=True, delete_existing=True).result()
    _describe(path, description, shape[0])


def make_room(path: Path, description: Description, rows: int) -> None:
    """Give an array so many rows."""
    before, _ = zarr_metadata(path)
    _describe(path, description, before, rows)
    store = open_array(path)
    store.resize(exclusive_max=[rows, *store.shape[1:]]).result()
    _describe(path, description, rows)


def _describe(path: Path, description: Description, *rows: int) -> None:
    replace(description, rows=rows, metadata=zarr_metadata(path)[1]).store(path)


def open_array(path: Path) -> Any:
    """TensorStore's view of an array; an error where it has none."""
    try:
        return tensorstore().open(_spec(path), open=True).result()
    except ValueError as error:
        raise damaged(path / METADATA, f"cannot be read ({error})") from error


def pieces_of(path: Path, store: Any, description: Description) -> Pieces:
    """The files of an array."""
    some, shape = store.chunk_layout.read_chunk.shape[0], store.shape
    return Pieces(path, some, _row_bytes(shape, store.dtype.numpy_dtype), len(shape), description.reverse)


def is_there(path: Path) -> bool:
    """Whether an array has been begun."""
    return (path / DESCRIPTION).exists() and (path / METADATA).exists()


def _spec(path: Path) -> dict[str, Any]:
    """Pieces of zeros are written too: one that is not there is lost."""
    place = {"driver": "file", "path": f"{path}/"}
    return {"driver": "zarr", "kvstore": place, "store_data_equal_to_fill_value": True}


def _row_bytes(shape: Sequence[int], dtype: Any) -> int:
    return prod(shape[1:]) * np.dtype(dtype).itemsize


def _zero(dtype: np.dtype) -> Any:
    """Zero as Zarr writes it for this type."""
    if dtype.kind == "c":
        return base64.b64encode(bytes(dtype.itemsize)).decode()
    return False if dtype == np.bool_ else 0


def _zarr_dtype(dtype: np.dtype) -> str:
    """As Zarr writes it; what NumPy itself does not know (bfloat16) has a name only."""
    return dtype.name if dtype.kind == "V" or dtype.name.startswith(("float8", "int4", "uint4")) else dtype.str
