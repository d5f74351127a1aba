"""Outputs of a durable run on disk: written as they come, and read without loading more than is asked for.

Each leaf is an array in Zarr's format (version 3). TensorStore writes it in pieces of some rows, each a file with a
checksum, and compares the checksum whenever it reads the piece. A description beside the arrays says what they are and
which rows are written: it is written when those rows are on disk, and before the save begins to which they belong.
"""

import json
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.durable.chunk import RowPlan, row_types
from loopax._src.durable.files import patiently, read_sealed, write_sealed
from loopax._src.durable.options import (
    clear_errors,
    ocp,
    on_first,
    tensorstore,
    whole_path,
)
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.leaves import Dynamic, Spec

PIECE_BYTES = 1 << 20  # of one stored piece of an array
WAITING_BYTES = 8 << 20  # of rows that wait to be written
WAITING_SECONDS = 1.0  # readers see what a run has written with this delay
_FEW_ROWS = 1024  # a piece has not fewer for want of rows: there may be more when the run is resumed
_DESCRIPTION, _METADATA = ".loopax.json", "zarr.json"  # ours, and Zarr's of one array, for other libraries

_clear_errors = partial(clear_errors, "writing outputs of a durable run", lambda: "The last good save is as it was")


@dataclass(frozen=True, eq=False)
class Rows:
    """An array of outputs on disk, `(rows, ...)`. An index reads only the rows that it selects.

    Attributes
    ----------
    shape, dtype
        As in the array that `loopax.scan` would return. Rows that have not been written are zero.

    """

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    key_impl: str | None = None  # of PRNG keys, which stand there as integers
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)  # Zarr's
    written: tuple[int, int] = field(default=(0, 0), repr=False)  # the rows that must be there, from and to

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return prod(self.shape) * self.dtype.itemsize

    @api_boundary
    def __getitem__(self, index: Any) -> Any:
        """Read a part of the array, as a NumPy array (a JAX array for PRNG keys).

        The index may hold ints, slices, and arrays of ints or bools.

        Raises
        ------
        IndexError
            There is no such row.
        RuntimeError
            The rows on disk differ from what was written; the error names the file and the rows.

        """
        index = _in_bounds(index, self.shape)
        pieces = _touched(index, len(self), self._piece_rows)
        known = [self._file(number) for number, _, _ in self._parts(*self.written) if number in pieces]
        try:
            if self.nbytes and not all(file.exists() for file in known):
                raise ValueError("a piece is gone")
            found = np.asarray(_open(self.path, self.metadata, assume_metadata=True)[index].read().result())
        except ValueError as error:
            self._check(*self.written, pieces)
            raise damaged(self.path, f"cannot be read ({error})") from error
        return found if self.key_impl is None else jax.random.wrap_key_data(jnp.asarray(found), impl=self.key_impl)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read all rows."""
        if copy is False:
            raise ValueError("rows on disk cannot be an array without a copy")
        return np.asarray(self[:], dtype)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rows. Rows are read in pieces of the file."""
        some = max(PIECE_BYTES // max(self.nbytes // max(len(self), 1), 1), 1)
        for start in range(0, len(self), some):
            yield from self[start : start + some]

    def _check(self, low: int, high: int, pieces: Container[int] | None = None) -> None:
        """Raise where some of these rows are not on disk as they were written; `pieces`: of these alone."""
        store = _open(self.path, self.metadata, assume_metadata=True, fill_missing_data_reads=False)
        for number, start, stop in self._parts(low, high):
            try:
                if pieces is None or number in pieces:
                    store[start:stop].read().result()
            except ValueError as error:
                what = f"does not hold rows {start} to {stop - 1} as they were written"
                remedy = " call the same function again (where a save precedes the rows, it computes them again),"
                raise damaged(self._file(number), what, remedy) from error

    @property
    def _piece_rows(self) -> int:
        return self.metadata["chunk_grid"]["configuration"]["chunk_shape"][0]

    def _parts(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Some rows by piece: its number, rows from and to."""
        some = self._piece_rows
        numbers = range(low // some, -(-high // some)) if low < high else ()
        return [(n, max(low, n * some), min(high, (n + 1) * some)) for n in numbers]

    def _file(self, number: int) -> Path:
        return self.path.joinpath("c", str(number), *["0"] * (len(self.metadata["shape"]) - 1))


def _open(path: Path, metadata: Mapping[str, Any], **options: Any) -> Any:
    """TensorStore's view of an array. Pieces of zeros are written too: one that is not there is lost."""
    place = {"driver": "file", "path": f"{path.as_posix()}/"}
    spec = {"driver": "zarr3", "kvstore": place, "metadata": metadata, "store_data_equal_to_fill_value": True}
    return tensorstore().open({**spec, **options}).result()


def damaged(file: Path, what: str, remedy: str = "") -> RuntimeError:
    """The error for a file of outputs: what is wrong with it, and, on a line of its own, what to do."""
    return RuntimeError(
        f"the outputs of a durable run are damaged: {file} {what}.\nRestore the file from a backup,{remedy} "
        "or delete the directory of the run to start anew."
    )


# NumPy's indices as TensorStore takes them: in bounds, and counted from the start.


def _in_bounds(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Write an index with numbers from 0 on, slices cut to the array, no ellipsis and no mask; errors as in NumPy."""
    np.broadcast_to(np.empty((), bool), shape)[index]
    parts = []
    for part in index if isinstance(index, tuple) else (index,):
        if part is None or part is ... or isinstance(part, slice):
            parts.append(part)
        elif (array := np.asarray(part)).dtype != np.bool_:
            parts.append(array.astype(np.int64))
        elif array.ndim:
            parts += array.nonzero()
        else:
            raise IndexError(f"got {part!r} as an index of rows")
    taken = sum(part is not None and part is not ... for part in parts)
    at = next((i for i, part in enumerate(parts) if part is ...), len(parts))
    parts[at : at + 1] = [slice(None)] * (len(shape) - taken)
    sizes = iter(shape)
    return tuple(None if part is None else _axis(part, next(sizes)) for part in parts)


def _axis(part: Any, size: int) -> Any:
    if not isinstance(part, slice):
        found = np.where(part < 0, part + size, part)
        return found if found.ndim else int(found)
    start, stop, step = part.indices(size)
    if step < 0:
        raise IndexError("rows on disk are read forwards: take a slice with a positive step, and turn what it gives")
    return slice(start, max(start, stop), step)


def _touched(index: tuple[Any, ...], rows: int, some: int) -> Container[int]:
    """The pieces of so many rows of which an index reads some."""
    first = next((part for part in index if part is not None), slice(None))
    if isinstance(first, slice):
        start, stop, _ = first.indices(rows)
        return range(start // some, -(-stop // some) if stop > start else 0)
    return set((np.unique(np.asarray(first)) // some).tolist())


# What describes the arrays of a run: of each its path in the pytree, the implementation of PRNG keys, Zarr's metadata.


def _describe(root: Path, arrays: Sequence[Mapping[str, Any]], written: tuple[int, int]) -> None:
    """Write it, with a checksum of its own. From then on readers see the arrays, all of them."""
    text = json.dumps({"arrays": list(arrays), "written": written})
    write_sealed(root / _DESCRIPTION, text)


def _described(root: Path) -> dict[str, Any]:
    """What has been written; an error where it is damaged."""
    file = root / _DESCRIPTION
    try:
        return json.loads(read_sealed(file))
    except (OSError, ValueError) as error:
        raise damaged(file, f"cannot be read ({type(error).__name__}: {error})") from error


def rows_of(root: Path) -> dict[str, Rows]:
    """The arrays of a run, by their paths in the pytree."""
    found, arrays = _described(root), {}
    for i, one in enumerate(found["arrays"]):
        metadata, impl = one["metadata"], one["key_impl"]
        shape, dtype = tuple(metadata["shape"]), tensorstore().dtype(metadata["data_type"]).numpy_dtype
        if impl is not None:
            key = jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl))
            shape = shape[: len(shape) - jax.eval_shape(jax.random.key_data, key).ndim]
            dtype = key.dtype
        arrays[one["path"]] = Rows(_path(root, i), shape, dtype, impl, metadata, tuple(found["written"]))
    return arrays


def _path(root: Path, i: int) -> Path:
    return root / f"{i:04d}"


@api_boundary
def outputs(directory: Any) -> dict[str, Rows]:
    """Return the outputs that a durable run has written, also while it runs.

    Rows that the run has not written yet are zero. `steps_saved` returns the number of steps that will not be computed
    again.

    Parameters
    ----------
    directory
        The directory of the run.

    Returns
    -------
    dict of str to Rows
        The arrays, by their paths in the pytree.

    Raises
    ------
    FileNotFoundError
        The directory holds no outputs.
    RuntimeError
        The file that describes the outputs is damaged; the error names the file.

    """
    root = whole_path("durable.outputs", directory) / "outputs"
    if not (root / _DESCRIPTION).exists():
        raise FileNotFoundError(f"{root.parent} holds no outputs of a durable run.")
    return rows_of(root)


@api_boundary
def steps_saved(directory: Any) -> int:
    """Return the number of steps up to the newest save in the directory of a durable loop.

    The result is 0 if there is no save.
    """
    saves = whole_path("durable.steps_saved", directory) / "saves"
    return max(ocp().utils.checkpoint_steps(saves), default=0) if saves.is_dir() else 0


class Outputs:
    """The arrays of a run, one for each of `spec`, to which the first process writes.

    Rows come in order, up or down; a few megabytes wait and are written together.
    """

    def __init__(
        self, where: str, root: Path, spec: Spec, plan: RowPlan, fill: Mapping[int, int] | None = None
    ) -> None:
        """`fill`: what rows hold that are not written, by array, if not zero."""
        self.where, self.root, self.spec, self.plan, self.fill = where, root / "outputs", spec, plan, fill or {}
        self.writes = False  # whether this process does: from `open` on
        self._known = self._written = (0, 0)
        self._waiting: list[tuple[int, list[np.ndarray]]] = []
        self._writing: list[Any] = []
        self._begun = time.perf_counter()

    def refuse_gone(self) -> None:
        """Raise where those of a run that has begun are gone, or what describes them is damaged."""
        paths = [_path(self.root, i) for i in range(len(self.spec.avals))]
        needed = [self.root / _DESCRIPTION, *paths, *(path / _METADATA for path in paths)]
        if gone := [str(path) for path in needed if not path.exists()]:
            raise RuntimeError(
                f"{self.where}: the outputs of the stored run, {', '.join(gone)}, are gone. Restore them, or delete "
                "the directory of the run to start anew."
            )
        _described(self.root)

    def check(self, steps: int) -> None:
        """Raise where the rows of so many steps, all those that belong to a save, are not on disk as written."""
        good = self.plan.taken(0, steps)
        on_first(lambda: [rows._check(*good) for rows in rows_of(self.root).values()])

    def open(self, steps: int, room: int | None = None) -> None:
        """Get ready to write after the rows of so many steps: to new arrays, if there are none."""
        good = self.plan.taken(0, steps) if steps else (0, 0)

        def begin() -> None:
            if steps:
                _describe(self.root, _described(self.root)["arrays"], good)
                # Pieces without any of these rows go: their rows will be written again, whatever they hold.
                for rows in rows_of(self.root).values():
                    kept = {rows._file(number) for number, _, _ in rows._parts(*good)}
                    for path in (rows.path / "c").rglob("*"):
                        if path.is_file() and path not in kept:
                            patiently(path.unlink)
            else:
                self._make()
            self._make_room(room or self.plan.capacity)

        on_first(begin)
        self._known = self._written = good
        self.writes = jax.process_index() == 0 and bool(self.spec.avals)

    def rows(self) -> Any:
        """The pytree of arrays on disk."""
        rest = iter(rows_of(self.root).values())
        return self.spec.treedef.unflatten(
            next(rest) if isinstance(leaf, Dynamic) else leaf.value for leaf in self.spec.leaves
        )

    def _make(self) -> None:
        """In the place of what a run has left that was never saved. Arrays of zeros take no room."""
        patiently(lambda: (self.root / _DESCRIPTION).unlink(missing_ok=True))
        arrays = []
        for i, (name, (shape, dtype, key_impl)) in enumerate(zip(self.spec.names(), row_types(self.spec), strict=True)):
            row_bytes = prod(shape) * np.dtype(dtype).itemsize
            rows = max(min(PIECE_BYTES // max(row_bytes, 1), max(self.plan.capacity, _FEW_ROWS)), 1)
            grid = {"chunk_shape": [rows, *(max(size, 1) for size in shape)]}
            wanted = {
                "shape": [self.plan.capacity, *shape],
                "data_type": tensorstore().dtype(dtype).name,
                "chunk_grid": {"name": "regular", "configuration": grid},
                "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
            }
            wanted |= {"fill_value": self.fill[i]} if i in self.fill else {}
            store = _open(_path(self.root, i), wanted, create=True, delete_existing=True)
            arrays.append({"path": name, "key_impl": key_impl, "metadata": store.spec().to_json()["metadata"]})
        self.root.mkdir(exist_ok=True)
        _describe(self.root, arrays, (0, 0))

    def _make_room(self, rows: int) -> None:
        """Give the arrays so many rows. The description, by which they are read, comes last."""
        found = _described(self.root)
        for i, one in enumerate(found["arrays"]):
            metadata, shape = one["metadata"], [rows, *one["metadata"]["shape"][1:]]
            rest = {name: value for name, value in metadata.items() if name != "shape"}
            try:
                _open(_path(self.root, i), rest).resize(exclusive_max=shape).result()
            except ValueError as error:
                raise damaged(_path(self.root, i) / _METADATA, f"cannot be read ({error})") from error
            one["metadata"] = {**metadata, "shape": shape}
        _describe(self.root, found["arrays"], tuple(found["written"]))
        self._room, arrays = rows, rows_of(self.root).values()
        self._stores = [_open(one.path, one.metadata, assume_metadata=True) for one in arrays]

    def resize(self, rows: int) -> None:
        """Make room for so many rows, or let go of the room behind them."""
        self.flush()
        self._make_room(rows)

    def write(self, steps: int, pieces: Sequence[np.ndarray]) -> None:
        """Copies of rows of the steps after so many, for each array. The room grows where it is used up."""
        start, stop = self.plan.taken(steps, len(pieces[0]))
        if stop > self._room:
            self.resize(max(2 * self._room, stop))
        self._waiting.append((start, [piece[:: self.plan.direction].copy() for piece in pieces]))
        low, high = self._written
        self._written = (start, stop) if low == high else (min(low, start), max(high, stop))
        is_much = sum(array.nbytes for _, pieces in self._waiting for array in pieces) >= WAITING_BYTES
        if is_much or time.perf_counter() - self._begun >= WAITING_SECONDS:
            self._begin()

    def flush(self) -> None:
        """Wait until everything is on disk, and say so."""
        self._begin()
        self._finish()
        if self._written != self._known:
            self._known = self._written
            with _clear_errors():
                _describe(self.root, _described(self.root)["arrays"], self._written)

    def _finish(self) -> None:
        writing, self._writing = self._writing, []
        with _clear_errors():
            for future in writing:
                future.result()

    def _begin(self) -> None:
        if not self._waiting:
            return
        self._finish()  # two writes at once into one piece of a file could lose one of them
        self._begun = time.perf_counter()
        waiting, self._waiting = sorted(self._waiting, key=lambda item: item[0]), []
        start = waiting[0][0]
        for store, *parts in zip(self._stores, *(pieces for _, pieces in waiting), strict=True):
            rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
            if rows.size:
                self._writing.append(store[start : start + len(rows)].write(rows))
