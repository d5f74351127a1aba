"""The device's side of a stream: chunks of rounds, compiled once."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax

from loopax._src.core import ItemRows, queue_for, run_chunk
from loopax._src.frontend.trace_program import ItemProgram, item_program
from loopax._src.jax_internals import trace_context
from loopax._src.pytrees.leaves import Spec, Static
from loopax._src.queues.items import settings_here

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
_KEPT = 8  # programs, so that another stream of the same function compiles nothing


class Program(NamedTuple):
    """A function of items for a number of lanes. It holds nothing of a stream."""

    made: ItemProgram
    run: Callable[..., Any]  # (state, shared, rows, most) -> (state, found)
    empty: Callable[[], Any]  # lanes without items


def compiled(function: Spec, item: Spec, lanes: int, places: int, info: bool) -> Program:
    """The program of a function and items like these; that of an earlier stream where it is the same.

    A round has so many places for items.
    """
    context = trace_context(), settings_here()  # the former knows not all of the latter
    try:
        hash((function, item))
    except TypeError:
        return _program.__wrapped__(function, item, lanes, places, info, context)
    return _program(function, item, lanes, places, info, context)


@lru_cache(maxsize=_KEPT)
def _program(function: Spec, item: Spec, lanes: int, places: int, info: bool, _: Any) -> Program:
    leaves = [leaf.value if isinstance(leaf, Static) else leaf.aval for leaf in function.leaves]
    made = item_program("lanes_stream", function.treedef.unflatten(leaves), item, function, info)

    def queue(shared: Sequence[Any]) -> Any:
        return queue_for(made.program, shared, item.avals, lanes, places)

    @partial(jax.jit, donate_argnums=0)
    def run(state: Any, shared: Sequence[Any], rows: ItemRows, most: Any) -> Any:
        return run_chunk(queue(shared), state, rows, most)

    return Program(made, run, jax.jit(lambda: queue([]).empty()))
