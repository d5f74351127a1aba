"""Outputs of a durable scan go to disk as they come."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from loopax._src.durable.errors import SaveError
from loopax._src.durable.outputs import Rows
from loopax._src.durable.pieces import Journal
from loopax._src.durable.zarr import open_array

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
