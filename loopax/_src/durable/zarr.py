"""Arrays of outputs on disk, in Zarr's format (version 2), which TensorStore writes and any Zarr library reads."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from loopax._src.durable.described import DESCRIPTION, METADATA, Description, damaged, zarr_metadata
from loopax._src.durable.orbax import tensorstore
from loopax._src.durable.pieces import Pieces

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
