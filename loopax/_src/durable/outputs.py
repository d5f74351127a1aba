"""Outputs of a durable scan as users read them: without loading more than is asked for."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.durable.described import Description, damaged
from loopax._src.durable.directory import whole_path, write_whole
from loopax._src.durable.indices import in_bounds
from loopax._src.durable.orbax import ocp
from loopax._src.durable.pieces import Pieces
from loopax._src.durable.zarr import PIECE_BYTES, open_array, pieces_of
from loopax._src.jax_internals import api_boundary

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
