"""States before chunks, that a gradient goes back to: on disk, written and read beside the run, and in memory."""

import time
import warnings
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jax
from jax import Array

from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.durable.options import DamagedSaveWarning
from loopax._src.durable.saves import SavedState, Saves, checked, checksums
from loopax._src.schedule import binomial


class Plan(NamedTuple):
    """Chunks, and how many states are kept at a time, beside the first one."""

    steps: int  # of the run; -1: nobody knows yet
    chunk: int  # steps of a chunk; the last one may have fewer
    disk: int  # states on disk
    memory: int  # states in memory
    is_spread: bool = False  # states on disk have the same distance; else those of the binomial schedule

    @property
    def chunks(self) -> int:
        """How many there are."""
        return self.chunks_before(self.steps)

    @property
    def slots(self) -> int:
        """All states that are kept at a time, with the first one."""
        return 1 + self.disk + self.memory

    def starts(self) -> set[int]:
        """The chunks before which the forward pass keeps the state."""
        if not self.is_spread:
            return set(binomial.starts(self.chunks, self.slots))
        on_disk = self.starts_on_disk()
        last = max(on_disk, default=0)
        return {*on_disk, *(last + i for i in binomial.starts(self.chunks - last, 1 + self.memory))}

    def starts_on_disk(self) -> frozenset[int]:
        """Those of states that are spread."""
        return _spread(self.chunks, self.disk) if self.is_spread else frozenset()

    def rows(self, chunk: int) -> tuple[int, int]:
        """The steps of a chunk, from and to."""
        return chunk * self.chunk, min((chunk + 1) * self.chunk, self.steps)

    def steps_behind(self, chunk: int) -> int:
        """The steps of this chunk and of those behind it."""
        return self.steps - min(chunk * self.chunk, self.steps)

    def chunks_before(self, step: int) -> int:
        """How many chunks have begun before so many steps are taken."""
        return -(-step // self.chunk)


@lru_cache
def _spread(chunks: int, states: int) -> frozenset[int]:
    """The chunks that begin equal parts of all chunks, but for the first."""
    return frozenset(i * chunks // (states + 1) for i in range(1, states + 1))


@dataclass
class Transfers:
    """What is written and read beside the run, one after another, and how long that takes.

    Several processes do it in step with each other: the run waits.
    """

    seconds: float = 0.0
    waited: float = 0.0  # of these, the run has waited for so many
    bytes_written: int = 0
    bytes_read: int = 0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "loopax.durable"))

    def begin(self, do: Callable[[], Any]) -> Future[Any]:
        """Do something when all before has been done."""

        def timed() -> Any:
            begun = time.perf_counter()
            try:
                return do()
            finally:
                self.seconds += time.perf_counter() - begun

        future = self._thread.submit(timed)
        if jax.process_count() > 1:
            self.wait(future)
        return future

    def wait(self, future: Future[Any]) -> Any:
        """What has been done, when it is."""
        begun = time.perf_counter()
        try:
            return future.result()
        finally:
            self.waited += time.perf_counter() - begun

    def close(self) -> None:
        """Wait for what has been begun."""
        self._thread.shutdown(cancel_futures=True)


@dataclass
class States:
    """Those that are kept. The first one is known: nobody stores it."""

    saves: Saves
    disk: int  # how many at a time
    memory: int
    first: list[Array]
    transfers: Transfers
    _in_memory: dict[int, list[Array]] = field(default_factory=dict)
    _on_disk: set[int] = field(default_factory=set)
    _changes: list[Future[Any]] = field(default_factory=list)  # on disk, that have begun
    _read: tuple[int, Future[Any]] | None = None  # ahead of its turn

    def begin(self, end: int, wanted: Container[int] | None = None) -> None:
        """Of those that an earlier process has left on disk, those before a chunk are kept, and others removed."""
        found = self.saves.steps()
        kept = [chunk for chunk in found if chunk < end and (wanted is None or chunk in wanted)]
        count = min(len(kept), self.disk)  # a run that goes on may have less room: those that are kept are spread
        self._on_disk = {kept[i * len(kept) // count] for i in range(count)}
        self._remove(set(found) - self._on_disk)

    def kept(self, end: int) -> list[int]:
        """The chunks before `end` before which a state is kept."""
        return sorted(chunk for chunk in {0, *self._on_disk, *self._in_memory} if chunk < end)

    def free(self) -> tuple[int, int]:
        """How many more have room on disk, and in memory."""
        return self.disk - len(self._on_disk), self.memory - len(self._in_memory)

    def on_disk(self, end: int) -> list[int]:
        """The chunks before `end` before which a state is on disk, or known as the first one."""
        return sorted(chunk for chunk in {0, *self._on_disk} if chunk < end)

    def keep(self, chunk: int, arrays: list[Array], to_disk: bool) -> None:
        """Store the state before a chunk."""
        if chunk in (0, *self._on_disk, *self._in_memory):
            return
        if not to_disk:
            self._in_memory[chunk] = arrays
            return
        self.finish()
        state, sums = SavedState(chunk, True, arrays), checksums(arrays)

        def write() -> None:
            self.saves.write(state, sums, is_older=True)
            self.saves.finish()

        self._changes.append(self.transfers.begin(write))
        self.transfers.bytes_written += num_bytes(map(jax.typeof, arrays))
        self._on_disk.add(chunk)

    def read(self, chunk: int) -> list[Array] | None:
        """A state as it was kept; None: it is damaged, and has been dropped."""
        if chunk == 0 or chunk in self._in_memory:
            return self._in_memory[chunk] if chunk else self.first
        self.read_ahead(chunk)
        assert self._read is not None
        (_, future), self._read = self._read, None
        try:
            arrays = checked(*self.transfers.wait(future)).arrays
        except Exception as error:  # noqa: BLE001, a damaged file makes errors of all kinds
            warnings.warn(
                f"{self.saves.where}: the state before chunk {chunk} in {self.saves.directory} is damaged and has been "
                f"removed ({type(error).__name__}: {error}). It is computed again from an earlier one.",
                DamagedSaveWarning,
                stacklevel=2,
            )
            self.drop(chunk)
            return None
        self.transfers.bytes_read += num_bytes(map(jax.typeof, arrays))
        return arrays

    def read_ahead(self, chunk: int) -> None:
        """Begin to read a state that is on disk."""
        if chunk not in self._on_disk or (self._read is not None and self._read[0] == chunk):
            return
        self._read = chunk, self.transfers.begin(lambda: self.saves.read(chunk, self.first))

    def drop(self, chunk: int) -> None:
        """Forget a state. A run that goes on from before computes it again."""
        if chunk in self._on_disk:
            self._on_disk.remove(chunk)
            self._remove({chunk})
        self._in_memory.pop(chunk, None)

    def _remove(self, chunks: Iterable[int]) -> None:
        """Remove files."""
        for chunk in sorted(chunks):
            self._changes.append(self.transfers.begin(lambda chunk=chunk: self.saves.remove(chunk)))

    def finish(self) -> None:
        """Wait until nothing is written or read: Orbax does one thing at a time."""
        while self._changes:
            self.transfers.wait(self._changes.pop(0))
        if self._read is not None:  # what has gone wrong with it, `read` says
            self.transfers.wait(self.transfers.begin(lambda: None))
