"""Outputs of a durable scan: on disk as they come, read without loading more than is asked for.

Each leaf is an array in Zarr's format (version 2), which TensorStore writes and any Zarr library reads.
"""

import base64
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopax.durable.directory import write_whole
from loopax.durable.errors import SaveError
from loopax.durable.indices import in_bounds
from loopax.durable.orbax import ocp, tensorstore

# Bytes of one stored piece of an array, rows of a compiled chunk of steps, and rows that wait to be written.
PIECE_BYTES = 1 << 20
CHUNK_BYTES = 32 << 20
WAITING_BYTES = 8 << 20
WAITING_SECONDS = 1.0  # readers see what a run has written with this delay
_FEW_ROWS = 1024  # a piece has not fewer for want of rows: there may be more when the run is resumed
_FORMAT = ".loopax.json"
_ALL = ".all"  # in the directory of the arrays, when each has been begun


@dataclass(frozen=True, eq=False)
class Rows:
    """An array of outputs on disk, `(rows, ...)`: what is indexed is read, and nothing else.

    Attributes
    ----------
    shape, dtype
        As of the array that `loopax.scan` would return. Rows that have not been written are zero.

    """

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    key_impl: str | None = None  # of PRNG keys, which stand there as integers

    def __len__(self) -> int:
        """The number of rows."""
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        """Read a part: a NumPy array (JAX's for PRNG keys). Ints, slices and arrays of ints or bools are taken."""
        found = np.asarray(_open(self.path)[in_bounds(index, self.shape)].read().result())
        return found if self.key_impl is None else jax.random.wrap_key_data(jnp.asarray(found), impl=self.key_impl)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read everything."""
        if copy is False:
            raise ValueError("rows on disk cannot be an array without a copy")
        return np.asarray(self[:], dtype)

    def __iter__(self) -> Iterator[Any]:
        """Row by row, a piece of the file at a time."""
        some = max(PIECE_BYTES // max(self.nbytes // max(len(self), 1), 1), 1)
        for start in range(0, len(self), some):
            yield from self[start : start + some]


class Writer:
    """Writes the rows of a run, which come in order, up or down; a few megabytes wait and are written together."""

    def __init__(self, arrays: Sequence[Rows]) -> None:
        """Write to these."""
        self._stores = [_open(rows.path) for rows in arrays]
        self._dtypes = [store.dtype.numpy_dtype for store in self._stores]
        self._waiting: list[tuple[int, list[np.ndarray]]] = []
        self._writing: list[Any] = []
        self._begun = time.monotonic()

    def write(self, start: int, pieces: Sequence[np.ndarray]) -> None:
        """Rows from `start` on, for each array; they are not changed afterwards."""
        self._waiting.append((start, list(pieces)))
        is_much = sum(_num_bytes(pieces) for _, pieces in self._waiting) >= WAITING_BYTES
        if is_much or time.monotonic() - self._begun >= WAITING_SECONDS:
            self._begin()

    def flush(self) -> None:
        """Wait until everything is on disk."""
        self._begin()
        self._finish()

    def _finish(self) -> None:
        """Wait for what is being written."""
        writing, self._writing = self._writing, []
        try:
            for future in writing:
                future.result()
        except Exception as error:
            raise SaveError(
                f"writing outputs of a durable scan failed ({type(error).__name__}: {error}). The last good save is as "
                "it was. Make room or mend the file system, and call again to go on from there."
            ) from error

    def _begin(self) -> None:
        """Begin to write what waits."""
        if not self._waiting:
            return
        self._finish()  # two writes at once into one piece of a file could lose one of them
        self._begun = time.monotonic()
        waiting, self._waiting = sorted(self._waiting, key=lambda item: item[0]), []
        start = waiting[0][0]
        for store, dtype, *parts in zip(self._stores, self._dtypes, *(pieces for _, pieces in waiting), strict=True):
            rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
            if rows.size:
                self._writing.append(store[start : start + len(rows)].write(rows.view(dtype)))


def _num_bytes(arrays: Sequence[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


def _row_bytes(shape: Sequence[int], dtype: Any) -> int:
    return prod(shape[1:]) * np.dtype(dtype).itemsize


def create(path: Path, name: str, shape: Sequence[int], dtype: Any, key_impl: str | None) -> None:
    """Make an array of zeros, which takes no room, or go on with the one that an interrupted run has begun."""
    some = max(min(PIECE_BYTES // max(_row_bytes(shape, dtype), 1), max(shape[0], _FEW_ROWS)), 1)
    spec = {
        "shape": list(shape),
        "chunks": [some, *(max(size, 1) for size in shape[1:])],
        "dtype": _zarr_dtype(np.dtype(dtype)),
        "fill_value": _zero(np.dtype(dtype)),
        "compressor": None,
    }
    if is_there(path):  # of fewer rows, perhaps
        _open(path).resize(exclusive_max=list(shape)).result()
    else:
        tensorstore().open(_spec(path) | {"metadata": spec}, create=True).result()
        write_whole(path / _FORMAT, json.dumps({"path": name, "key_impl": key_impl}))


def rows_at(path: Path) -> Rows:
    """What is on disk."""
    store, key_impl = _open(path), json.loads((path / _FORMAT).read_text())["key_impl"]
    shape, dtype = tuple(store.shape), store.dtype.numpy_dtype
    if key_impl is None:
        return Rows(path, shape, dtype)
    key = jax.eval_shape(lambda: jax.random.key(0, impl=key_impl))
    data = jax.eval_shape(jax.random.key_data, key)
    return Rows(path, shape[: len(shape) - data.ndim], key.dtype, key_impl)


def is_there(path: Path) -> bool:
    """Whether an array has been begun."""
    return (path / _FORMAT).exists() and (path / ".zarray").exists()


def all_begun(directory: Path) -> None:
    """Say to readers that every array is there: they see all of a run's or none."""
    directory.mkdir(exist_ok=True)
    (directory / _ALL).touch()


def outputs(directory: Any) -> dict[str, Rows]:
    """The outputs in the directory of a durable scan, by their paths in the pytree, also while it runs.

    Rows that the run has not written yet are zero; `steps_saved` says how many will not be written again.
    """
    root = Path(directory).expanduser().absolute() / "outputs"
    if not (root / _ALL).exists():
        raise FileNotFoundError(f"{root.parent} holds no outputs of a `loopax.durable.scan`.")
    found = {}
    for path in sorted(filter(is_there, root.iterdir())):
        found[json.loads((path / _FORMAT).read_text())["path"]] = rows_at(path)
    return found


def steps_saved(directory: Any) -> int:
    """The steps up to the newest save in the directory of a durable loop; 0 where there is none."""
    saves = Path(directory).expanduser().absolute() / "saves"
    return max(ocp().utils.checkpoint_steps(saves), default=0) if saves.is_dir() else 0


def _open(path: Path) -> Any:
    return tensorstore().open(_spec(path), open=True).result()


def _spec(path: Path) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}


def _zero(dtype: np.dtype) -> Any:
    """Zero as Zarr writes it for this type."""
    if dtype.kind == "c":
        return base64.b64encode(bytes(dtype.itemsize)).decode()
    return False if dtype == np.bool_ else 0


def _zarr_dtype(dtype: np.dtype) -> str:
    """As Zarr writes it; what NumPy itself does not know (bfloat16) has a name only."""
    return dtype.name if dtype.kind == "V" or dtype.name.startswith(("float8", "int4", "uint4")) else dtype.str
