"""Results of items on disk: rows in the order in which items are finished, with the indices of the items."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import core

from loopax._src.durable.described import Description
from loopax._src.durable.directory import Directory
from loopax._src.durable.output_arrays import Outputs, with_rows
from loopax._src.durable.outputs import Rows, rows_at
from loopax._src.durable.pieces import Journal
from loopax._src.durable.row_plan import RowPlan
from loopax._src.durable.writer import Writer
from loopax._src.durable.zarr import make_room
from loopax._src.pytrees.leaves import Dynamic, Spec

_FIRST_ROOM = 1024  # rows; the room doubles where it is used up
_ITEMS, _NO_ITEM = 1, -1  # the array of indices, and what it holds where no row is written


class ResultRows:
    """Arrays on disk that grow: indices of items, whether they failed, and their results."""

    def __init__(self, where: str, directory: Directory, results: Spec) -> None:
        """Nothing is opened."""
        self._where, self._directory = where, directory
        self._spec = _with_rows_of(results)
        self._arrays: list[Rows] = []
        self._journals: list[Journal] = []
        self._writer: Writer | None = None
        self.count = 0  # rows that are written, or are being written

    def refuse_gone(self) -> None:
        """Raise where what has been begun is gone."""
        self._outputs(0).refuse_gone()

    def check(self, rows: int) -> None:
        """Raise where so many rows are not on disk as written."""
        self._outputs(rows).check(rows)

    def open(self, rows: int) -> None:
        """Go on after so many rows."""
        self.count = rows
        self._arrays, self._journals = self._outputs(max(2 * rows, _FIRST_ROOM)).open(rows)
        self._writer = Writer(self._arrays, self._journals)

    def append(self, indices: Sequence[int], failed: Sequence[bool], results: Sequence[np.ndarray]) -> None:
        """One more row for each item."""
        assert self._writer is not None
        if not indices:
            return
        room, after = len(self._arrays[0]), self.count + len(indices)
        if after > room:
            self._resize(max(2 * room, after))
        self._writer.write(self.count, [np.asarray(failed, bool), np.asarray(indices, np.int64), *results])
        self.count = after

    def flush(self) -> None:
        """Wait until all rows are on disk."""
        assert self._writer is not None
        self._writer.flush()

    def close(self) -> Any:
        """Let go of room that no row takes; returns the pytree `{items, failed, results}` of rows."""
        if self._writer is None:
            return None
        self._resize(self.count)
        return with_rows(self._spec, self._arrays)

    def _resize(self, rows: int) -> None:
        self.flush()  # a writer knows how many rows there were when it was made
        for array in self._arrays:
            make_room(array.path, Description.stored(array.path), rows)
        self._arrays = [rows_at(array.path) for array in self._arrays]
        self._writer = Writer(self._arrays, self._journals)

    def _outputs(self, room: int) -> Outputs:
        return Outputs(self._where, self._directory, self._spec, RowPlan(room, 0, reverse=False), {_ITEMS: _NO_ITEM})


def _with_rows_of(results: Spec) -> Spec:
    """The pytree `{items, failed, results}` of arrays of rows."""
    leaves = [
        replace(leaf, aval=leaf.aval.update(shape=(1, *leaf.aval.shape))) if isinstance(leaf, Dynamic) else leaf
        for leaf in results.leaves
    ]
    names = {"items": 0, "failed": 0, "results": results.treedef.unflatten(range(len(leaves)))}
    treedef = jax.tree.structure(names)
    own = [Dynamic(core.ShapedArray((1,), np.dtype(dtype))) for dtype in (bool, np.int64)]
    return Spec(treedef, (*own, *leaves))  # a dict is flattened in the order of its keys: failed, items, results
