"""The device's side of a stream: chunks of rounds, compiled once."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from loopax._src.core import NO_ITEM, ItemRows, queue_for, run_chunk
from loopax._src.frontend.trace_program import ItemProgram, item_program
from loopax._src.jax_internals import trace_context
from loopax._src.pytrees.leaves import Spec, Static
from loopax._src.queues.items import Settings

SECONDS = 0.05  # of a chunk, about: so long a finished item waits, and a new one, where items are slow to come
FIRST = 64  # steps
_GROWTH = 8
_MOST = 2**24


class ChunkPace:
    """Steps between two looks of the host: the given number, or as many as take `SECONDS`."""

    def __init__(self, given: int | None) -> None:
        """`steps` is the most of the next chunk."""
        self._given = given
        self.steps = FIRST if given is None else given

    def measured(self, steps: int, seconds: float, at_most: bool) -> None:
        """A chunk took so long, or `at_most` so long: it was done before the host looked."""
        if self._given is None and steps:
            wanted = int(SECONDS * steps / max(seconds, 1e-9))
            least = self.steps if at_most else 1
            self.steps = max(least, min(wanted, self.steps * _GROWTH, _MOST))


# A round takes the results of one lane in so many, and gives as many lanes an item. With fewer lanes in a round fewer
# lanes are idle, and there are more rounds.
PART = 10
NUMBERS = 2**31 - 1  # of items on the device
_KEPT = 8  # programs, so that another stream of the same function compiles nothing


class FinishedItems(NamedTuple):
    """What came out of a chunk, on the host."""

    numbers: np.ndarray  # (rows + 1, places) of the items that are done, NO_ITEM where there is none
    outputs: list[Any]  # (rounds + 1, places, ...) arrays of JAX
    rows: int  # of items that were begun
    free: int  # lanes without an item
    iterations: int
    useful: int  # steps of lanes

    @property
    def finished(self) -> np.ndarray:
        """The numbers of the items that are done."""
        return self.numbers[self.numbers != NO_ITEM]

    def results(self) -> list[np.ndarray]:
        """The outputs of the items that are done: (items, ...)."""
        done = self.numbers != NO_ITEM
        return [np.asarray(x)[: len(done)][done] for x in self.outputs]


class Block(NamedTuple):
    """The items of a chunk."""

    numbers: Any  # int32[rounds, places], NO_ITEM where there is none
    inputs: list[Any]  # (rounds, places, ...)
    counts: list[int]  # items of each row that has any
    first: int  # lanes that must be free for the first row


class Program(NamedTuple):
    """A function of items for a number of lanes. It holds nothing of a stream."""

    made: ItemProgram
    item_avals: list[Any]
    lanes: int
    places: int  # items of a round
    rounds: int  # of a chunk, at most
    run: Callable[..., Any]  # (state, shared, rows, most) -> (state, found)
    empty: Callable[[], Any]  # lanes without items

    def block(self, items: Sequence[tuple[int, list[np.ndarray]]], first: int) -> "Block":
        """Numbered items in rows, of which the first has so many at most."""
        numbers = np.full((self.rounds, self.places), NO_ITEM, np.int32)
        inputs = [np.zeros((self.rounds, self.places, *aval.shape), aval.dtype) for aval in self.item_avals]
        counts = [min(len(items), first, self.places)] if items else []
        while (left := len(items) - sum(counts)) > 0:
            counts.append(min(left, self.places))
        if items:
            at = np.repeat(np.arange(len(counts)), counts), np.concatenate([np.arange(count) for count in counts])
            numbers[at] = [index % NUMBERS for index, _ in items]
            for i, rows in enumerate(inputs):
                rows[at] = np.stack([arrays[i] for _, arrays in items])
        return Block(numbers, inputs, counts, first)

    def most_items(self, first: int) -> int:
        """How many fit in rows of which the first has so many at most."""
        return min(first, self.places) + (self.rounds - 1) * self.places if first else 0


def results_of(found: Any) -> FinishedItems:
    """Wait for a chunk."""
    rows, free, iterations, useful = (int(x) for x in (found.rows, found.free, found.iterations, found.useful))
    return FinishedItems(np.asarray(found.finished)[: rows + 1], found.outputs, rows, free, iterations, useful)


def compiled(function: Spec, item: Spec, lanes: int, info: bool) -> Program:
    """The program of a function and items like these; that of an earlier stream where it is the same."""
    context = trace_context(), Settings.here()  # the former knows not all of the latter
    try:
        hash((function, item))
    except TypeError:
        return _program.__wrapped__(function, item, lanes, info, context)
    return _program(function, item, lanes, info, context)


@lru_cache(maxsize=_KEPT)
def _program(function: Spec, item: Spec, lanes: int, info: bool, _: Any) -> Program:
    leaves = [leaf.value if isinstance(leaf, Static) else leaf.aval for leaf in function.leaves]
    made = item_program("lanes_stream", function.treedef.unflatten(leaves), item, function, info)
    places = max(lanes // PART, 1)

    def queue(shared: Sequence[Any]) -> Any:
        return queue_for(made.program, shared, item.avals, lanes, places)

    @partial(jax.jit, donate_argnums=0)
    def run(state: Any, shared: Sequence[Any], rows: ItemRows, most: Any) -> Any:
        return run_chunk(queue(shared), state, rows, most)

    return Program(made, item.avals, lanes, places, 2 * lanes // places, run, jax.jit(lambda: queue([]).empty()))
