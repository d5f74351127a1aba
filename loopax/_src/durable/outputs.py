"""Outputs of a durable scan as users read them: without loading more than is asked for."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.durable.checksums import Description, Journal, Pieces, damaged
from loopax._src.durable.chunk import row_types
from loopax._src.durable.options import Directory, SaveError, ocp, on_first, whole_path, write_whole
from loopax._src.durable.zarr import PIECE_BYTES, RowPlan, create, in_bounds, is_there, make_room, open_array, pieces_of
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.leaves import Dynamic, Spec

_ALL = ".all"  # in the directory of the arrays, when each has been begun


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
    pieces: Pieces | None = field(default=None, repr=False)  # None: without checksums, as format 1 wrote them

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
        index = in_bounds(index, self.shape)
        if self.pieces is not None:
            self.pieces.check_read(_touched(index, len(self), self.pieces.rows))
        try:
            found = np.asarray(open_array(self.path)[index].read().result())
        except ValueError as error:
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


def _touched(index: tuple[Any, ...], rows: int, some: int) -> Iterable[int]:
    """The pieces of which an index reads rows."""
    first = next((part for part in index if part is not None), slice(None))
    if isinstance(first, slice):
        start, stop, _ = first.indices(rows)
        return range(start // some, -(-stop // some)) if stop > start else ()
    return np.unique(np.asarray(first) // some).tolist()


def rows_at(path: Path) -> Rows:
    """What is on disk; an error where what describes it is damaged."""
    description = Description.stored(path)
    store = open_array(path)
    pieces = pieces_of(path, store, description) if description.has_checksums else None
    shape, dtype, impl = tuple(store.shape), store.dtype.numpy_dtype, description.key_impl
    if impl is None:
        return Rows(path, shape, dtype, None, pieces)
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    data = jax.eval_shape(jax.random.key_data, key)
    return Rows(path, shape[: len(shape) - data.ndim], key.dtype, impl, pieces)


def all_begun(directory: Path, count: int) -> None:
    """Say to readers that every array is there: they see all of a run's or none."""
    directory.mkdir(exist_ok=True)
    write_whole(directory / _ALL, f"{count} arrays")


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
        A file that describes the outputs is damaged; the error names the file.

    """
    root = whole_path("durable.outputs", directory) / "outputs"
    if not (root / _ALL).exists():
        raise FileNotFoundError(f"{root.parent} holds no outputs of a `loopax.durable.scan`.")
    return {Description.stored(path).path: rows_at(path) for path in _arrays(root)}


def _arrays(root: Path) -> list[Path]:
    """The directories of all arrays."""
    text = (root / _ALL).read_text(errors="replace")
    found = re.fullmatch("([0-9]+) arrays", text)
    if found:
        return [root / array_name(i) for i in range(int(found[1]))]
    if text:
        raise damaged(root / _ALL, "does not say how many arrays there are")
    return sorted(path for path in root.iterdir() if path.is_dir())  # of format 1


def array_name(i: int) -> str:
    """Of the directory of an array."""
    return f"{i:04d}"


@api_boundary
def steps_saved(directory: Any) -> int:
    """Return the number of steps up to the newest save in the directory of a durable loop.

    The result is 0 if there is no save.
    """
    saves = whole_path("durable.steps_saved", directory) / "saves"
    return max(ocp().utils.checkpoint_steps(saves), default=0) if saves.is_dir() else 0


# Outputs of a durable scan go to disk as they come.


WAITING_BYTES = 8 << 20  # of rows that wait to be written
WAITING_SECONDS = 1.0  # readers see what a run has written with this delay


class Writer:
    """Writes the rows of a run, which come in order, up or down; a few megabytes wait and are written together."""

    def __init__(self, arrays: Sequence[Rows], journals: Sequence[Journal]) -> None:
        """Write to these."""
        self._stores, self._journals = [open_array(rows.path) for rows in arrays], journals
        self._dtypes = [store.dtype.numpy_dtype for store in self._stores]
        self._waiting: list[tuple[int, list[np.ndarray]]] = []
        self._writing: list[Any] = []
        self._begun = time.monotonic()

    def write(self, start: int, pieces: Sequence[np.ndarray]) -> None:
        """Rows from `start` on, for each array; they are not changed afterwards."""
        self._waiting.append((start, list(pieces)))
        for journal, rows in zip(self._journals, pieces, strict=True):
            journal.add(start, rows)
        is_much = sum(_num_bytes(pieces) for _, pieces in self._waiting) >= WAITING_BYTES
        if is_much or time.monotonic() - self._begun >= WAITING_SECONDS:
            self._begin()

    def flush(self) -> None:
        """Wait until everything is on disk, with its checksums."""
        self._begin()
        self._finish()
        with _clear_errors():
            for journal in self._journals:
                journal.write()

    def _finish(self) -> None:
        """Wait for what is being written."""
        writing, self._writing = self._writing, []
        with _clear_errors():
            for future in writing:
                future.result()

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


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SaveError(
            f"writing outputs of a durable scan failed ({type(error).__name__}: {error}). The last good save is as "
            "it was. Make room or mend the file system, and call again to go on from there."
        ) from error


def _num_bytes(arrays: Sequence[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


# The outputs of a durable scan as a pytree of arrays on disk.


@dataclass(frozen=True)
class Outputs:
    """The arrays of a scan, one for each of `spec`."""

    where: str
    directory: Directory
    spec: Spec
    plan: RowPlan
    fill: Mapping[int, int] = field(default_factory=dict)  # what rows hold that are not written, by array, if not zero

    @property
    def paths(self) -> list[Path]:
        """Where they stand."""
        return [self.directory.outputs / array_name(i) for i in range(len(self.spec.avals))]

    def refuse_gone(self) -> None:
        """Raise where those of a run that has begun are gone, or what describes them is damaged."""
        if gone := [str(path) for path in self.paths if not is_there(path)]:
            raise RuntimeError(
                f"{self.where}: the outputs of the stored run, {', '.join(gone)}, are gone. Restore them, or delete "
                "the directory of the run to start anew."
            )
        for path in self.paths:
            rows_at(path)

    def check(self, steps: int) -> None:
        """Raise where the rows of so many steps, all those that belong to a save, are not on disk as written."""

        def check_all() -> None:
            for pieces in filter(None, (rows_at(path).pieces for path in self.paths)):
                pieces.check_settled(*self.plan.taken(steps))

        on_first(check_all)

    def open(self, steps: int) -> tuple[list[Rows], list[Journal]]:
        """The arrays, to be written after the rows of so many steps, and, in the first process, their journals."""
        journals: list[Journal] = []
        types = zip(self.paths, self.spec.names(), row_types(self.spec), strict=True)

        def open_all() -> None:
            for i, (path, name, (shape, dtype, key_impl)) in enumerate(types):
                description = Description(name, key_impl, self.plan.reverse)
                shape = (self.plan.capacity, *shape)
                fill = self.fill.get(i, 0)
                journals.append(_open(path, description, shape, dtype, self.plan.taken(steps), fill))
            all_begun(self.directory.outputs, len(self.paths))

        on_first(open_all)
        return [rows_at(path) for path in self.paths], journals


def _open(
    path: Path, description: Description, shape: Sequence[int], dtype: Any, good: tuple[int, int], fill: int
) -> Journal:
    """Make an array, or go on with the one of which so many rows are good."""
    is_new = good[0] == good[1]
    if is_new:
        create(path, description, shape, dtype, fill)
    trusted = not Description.stored(path).has_checksums
    pieces = pieces_of(path, open_array(path), description)
    last = pieces.settle(*good, trusted)
    if not is_new:  # the checksums are there, so it can say so now
        make_room(path, description, shape[0])
    return Journal(pieces, last)


def with_rows(spec: Spec, arrays: Sequence[Rows]) -> Any:
    """The pytree of outputs."""
    rest = iter(arrays)
    return spec.treedef.unflatten(next(rest) if isinstance(leaf, Dynamic) else leaf.value for leaf in spec.leaves)
