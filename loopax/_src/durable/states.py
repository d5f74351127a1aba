"""States before chunks, that a gradient goes back to: on disk, and in memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from loopax._src.durable.saves import SavedState, Saves


class Plan(NamedTuple):
    """Chunks, and how many states are kept at a time, beside the first one."""

    steps: int  # of the run
    chunk: int  # steps of a chunk; the last one may have fewer
    disk: int  # states on disk
    memory: int  # states in memory

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.steps // self.chunk)

    @property
    def slots(self) -> int:
        """All states that are kept at a time, with the first one."""
        return 1 + self.disk + self.memory

    def rows(self, chunk: int) -> tuple[int, int]:
        """The rows of a chunk, from and to."""
        return chunk * self.chunk, min((chunk + 1) * self.chunk, self.steps)

    def steps_behind(self, chunk: int) -> int:
        """The steps of this chunk and of those behind it."""
        return self.steps - min(chunk * self.chunk, self.steps)

    def chunk_before(self, steps: int) -> int:
        """The chunk before which are so many steps, of all chunks from it on."""
        return -(-(self.steps - steps) // self.chunk)


@dataclass
class States:
    """Those that are kept. The first one is known: nobody stores it."""

    saves: Saves
    plan: Plan
    first: list[Array]
    make_room: Callable[[], None] = lambda: None  # makes a save of the way back, and calls `clear`
    in_memory: dict[int, list[Array]] = field(default_factory=dict)
    on_disk: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)  # still on disk, as a run that goes on may need them

    def begin(self, end: int) -> None:
        """Of those that an earlier process has left on disk, those before a chunk are kept, and others removed."""
        found = set(self.saves.steps())
        self.on_disk = {chunk for chunk in found if chunk < end}
        self.dropped = found - self.on_disk
        self.clear()

    def kept(self, end: int) -> list[int]:
        """The chunks before `end` before which a state is kept."""
        return sorted(chunk for chunk in {0, *self.on_disk, *self.in_memory} if chunk < end)

    def keep(self, chunk: int, arrays: list[Array]) -> None:
        """Store a state: on disk as long as there is room, since those that are stored first are kept for longest."""
        if chunk == 0 or chunk in self.on_disk or chunk in self.in_memory:
            return
        if len(self.on_disk) == self.plan.disk:
            self.in_memory[chunk] = [jnp.copy(x) for x in arrays]
            return
        if len(self.on_disk) + len(self.dropped) == self.plan.disk:
            self.make_room()
        self.saves.start(SavedState(chunk, True, arrays), is_older=True)
        self.on_disk.add(chunk)

    def read(self, chunk: int) -> list[Array]:
        """A state as it was kept."""
        if chunk == 0 or chunk in self.in_memory:
            return [jnp.copy(x) for x in (self.in_memory[chunk] if chunk else self.first)]
        self.saves.finish()
        return self.saves.read(chunk, self.first)

    def drop(self, chunk: int) -> None:
        """Forget a state; its files stay until `clear`."""
        if chunk in self.on_disk:
            self.on_disk.remove(chunk)
            self.dropped.add(chunk)
        self.in_memory.pop(chunk, None)

    def clear(self) -> None:
        """Remove the files of states that nobody needs any more, not even a run that goes on."""
        self.saves.finish()
        for chunk in sorted(self.dropped):
            self.saves.remove(chunk)
        self.dropped.clear()
