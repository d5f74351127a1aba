"""The lanes of a stream: a program runs chunks of rounds, and the host gives these items and takes what they found."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple
from weakref import finalize

import jax
import numpy as np

from loopax._src.core import NO_ITEM, ItemRows, queue_for, run_chunk
from loopax._src.core.jaxpr.util import split_list
from loopax._src.frontend.options import check_callable
from loopax._src.frontend.raising import with_amounts
from loopax._src.frontend.run_time_checks import Check
from loopax._src.frontend.trace_program import ItemProgram, item_program
from loopax._src.jax_internals import trace_context
from loopax._src.nnx.functional import freeze
from loopax._src.progress import Reporter, Shown, to_progress
from loopax._src.pytrees.leaves import Spec, Static, pack, type_in_words
from loopax._src.pytrees.static import Why, positive_int
from loopax._src.queues.items import Items, settings_here, with_settings

NUMBERS = 2**31 - 1  # of items on the device
WHY = Why("how the stream is run", "choose one for the whole stream: results do not depend on it")
# A round takes the results of one lane in so many, and gives as many lanes an item. With fewer lanes in a round fewer
# lanes are idle, and there are more rounds.
PART = 10
_KEPT = 8  # programs, so that another stream of the same function compiles nothing
SECONDS = 0.05  # of a chunk, about: so long a finished item waits, and a new one, where items are slow to come
FIRST = 64  # steps
_GROWTH = 8
_MOST = 2**24


class StreamReport(NamedTuple):
    """What the lanes of a stream did.

    Attributes
    ----------
    items
        The number of finished items.
    lanes
        The number of lanes.
    iterations
        The number of batched steps. In each, all lanes are computed.
    useful
        The number of steps of single lanes that held an item.
    iterations_fed, useful_fed
        `iterations` and `useful`, counted until the source of items ended.
    seconds
        The seconds since the first item.

    """

    items: int
    lanes: int
    iterations: int
    useful: int
    iterations_fed: int
    useful_fed: int
    seconds: float

    @property
    def share(self) -> float:
        """The useful share: `useful / (lanes * iterations)`; 1 if there are no iterations."""
        return self.useful / (self.lanes * self.iterations) if self.iterations else 1.0

    @property
    def share_fed(self) -> float:
        """The useful share until the source of items ended."""
        return self.useful_fed / (self.lanes * self.iterations_fed) if self.iterations_fed else 1.0

    def __str__(self) -> str:
        """Return the report as two lines of text."""
        seconds = self.seconds or float("inf")
        return (
            f"{self.items} items through {self.lanes} lanes: {self.items / seconds:.4g} items/s, "
            f"{self.useful / seconds:.4g} steps/s\n"
            f"{self.iterations} iterations, {self.useful} steps of lanes: {self.share:.0%} useful, "
            f"{self.share_fed:.0%} until the source ended"
        )


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


class Program(NamedTuple):
    """A function of items for a number of lanes. It holds nothing of a stream."""

    made: ItemProgram
    run: Callable[..., Any]  # (state, shared, rows, most) -> (state, found)
    empty: Callable[[], Any]  # lanes without items


def compiled(function: Spec, item: Spec, lanes: int, places: int, info: bool) -> Program:
    """The program of a function and items like these; that of an earlier stream where it is the same."""
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


class Finished(NamedTuple):
    indices: list[int]
    errors: list[str | None]  # the message of the check that failed
    infos: list[np.ndarray]  # with `info`: the two numbers of a `LoopInfo`
    arrays: list[np.ndarray]  # (items, ...) for each array of a result


class Block(NamedTuple):
    numbers: Any  # int32[rounds, places], NO_ITEM where there is none
    inputs: list[Any]  # (rounds, places, ...)
    counts: list[int]  # items of each row that has any
    first: int  # lanes that must be free for the first row


class BusyLanes(NamedTuple):
    """Where the lanes are, in NumPy arrays."""

    indices: np.ndarray  # int64[lanes], NO_ITEM where there is none
    inputs: list[np.ndarray]  # (lanes, ...) for each array of an item
    inside: list[np.ndarray]  # (lanes, ...) for each array of the loop's state


class WorkingLanes:
    """Lanes that work on items. It is told to look, and then says which items are done."""

    def __init__(
        self,
        name: str,
        f: Callable[[Any], Any],
        items: Iterable[Any],
        num_lanes: Any,
        chunk_steps: Any,
        prefetch: Any,
        progress: Any,
        info: bool = False,
        more: int = 0,
    ) -> None:
        """Check the options of a stream, which has so many more than `items`.

        Nothing is run before the first look. Whoever makes this starts the items.
        """
        check_callable(f"f of {name}", f)
        self.num_lanes = positive_int(f"{name}(num_lanes=...)", num_lanes, "lanes", WHY)
        if chunk_steps is not None:
            chunk_steps = positive_int(f"{name}(chunk_steps=...)", chunk_steps, "steps", WHY)
        if isinstance(prefetch, bool) or not isinstance(prefetch, int):
            raise TypeError(f"{name}(prefetch=...): got {prefetch!r}, expected an int: multiples of `num_lanes`.")
        if prefetch < 0:
            raise ValueError(f"{name}(prefetch=...): got {prefetch}, expected 0 or more: multiples of `num_lanes`.")
        if not isinstance(items, Iterable):
            raise TypeError(f"{name}(items=...): got a {type(items).__name__}, expected an iterable of items.")
        asked = to_progress(name, progress)
        reporter = None if asked is None else Reporter.of(asked, name, f, "item")
        self._shown = Shown(reporter, len(items) + more if isinstance(items, Sized) else None)
        self.finished_before = 0  # items, by other processes
        self.function_arrays, self._function = pack(freeze(f))
        self._places = max(self.num_lanes // PART, 1)  # for items of a round
        self._rounds = 2 * self.num_lanes // self._places  # of a chunk, at most
        self._pace, self._name, self._info = ChunkPace(chunk_steps), name, info
        self.waiting: deque[tuple[int, list[np.ndarray]]] = deque()  # items that were taken, for a lane
        self._in_lanes: dict[int, int] = {}  # by number: the index
        self._program: Program | None = None
        self._state: Any = None
        self.running: Any = None  # what a chunk will have found, and what it was given
        self._block: tuple[Any, Block] | None = None  # the first item that waits, and the next chunk's
        self._counts = [0] * 5  # items, iterations, useful, and the last two until the source ended
        self._began: float | None = None
        self._seconds = 0.0  # from there to when a chunk was last done
        self.items = Items(prefetch * self.num_lanes)
        finalize(self, self.items.stop, wait=False)
        self.num_begun = 0  # items that are or were in lanes: the first ones
        self._settings = settings_here()

    # ---- what an owner asks for

    @property
    def program(self) -> Program:
        """The compiled program, from the first item on."""
        if self._program is None or self._state is None:
            with with_settings(self._settings):
                made_for = self._function, self.items.spec, self.num_lanes, self._places, self._info
                self._program = self._program or compiled(*made_for)
                self._state = self._program.empty()
        return self._program

    def look(self, start_next: bool = True, patience: float | None = None) -> Finished | None:
        """Wait for the chunk that is running, or else for an item; None where nothing is left to do.

        The next chunk is started before anything is done with what was found. `patience`: seconds to wait for an item.
        """
        with with_settings(self._settings):
            self._shown.begin(self.finished_before)
            if self.running is None and not self._start():
                if self.items.is_empty:
                    self._shown.end(finished=True)
                    return None
                self.items.wait(patience)
                finished = Finished([], [], [], [])
            else:
                indices, done, outputs = self._collect()
                if start_next:
                    self._start()  # the device runs while results and items are made ready, and used
                results = [np.asarray(x)[: len(done)][done] for x in outputs]
                of_checks, infos, arrays = split_list(results, [sum(self.program.made.flags.sizes), 2 * self._info])
                checks = self.program.made.flags.checks(of_checks)
                errors = [self._message(checks, *at) for at in enumerate(indices)]
                self._prepare()
                finished = Finished(indices, errors, infos, arrays)
            items, _, useful, *_ = self._counts
            self._shown.update(items, len(self._in_lanes), useful)
            return finished

    def _message(self, checks: Sequence[Check], place: int, index: int) -> str | None:
        """What the first check says that failed for the item at this place."""
        texts = (with_amounts(x.message, [a[place] for a in x.amounts]) for x in checks if x.failed[place])
        text = next(texts, None)
        return None if text is None else f"item {index} of {self._name}: {text}"

    def close(self) -> None:
        self.items.stop(wait=False)
        self._shown.end(finished=False)
        self._state = self.running = self._block = None
        self.waiting.clear()
        self._in_lanes.clear()

    def busy(self) -> BusyLanes | None:
        """Where the lanes are; None where no item was begun. No chunk may run."""
        if self._state is None:
            return None
        lane = jax.device_get(self._state)
        indices = np.full(self.num_lanes, NO_ITEM, np.int64)
        at = np.flatnonzero(lane.item != NO_ITEM)
        indices[at] = [self._in_lanes[int(number)] for number in lane.item[at]]
        return BusyLanes(indices, lane.inputs, jax.tree.leaves(lane.inside))

    def go_on(self, at: BusyLanes) -> None:
        """Be where lanes were; a ValueError where another function has left them."""
        self.program  # noqa: B018 - makes the state
        expected = [type_in_words(x) for x in [*self._state.inputs, *jax.tree.leaves(self._state.inside)]]
        got = [type_in_words(x) for x in [*at.inputs, *at.inside]]
        if got != expected:
            raise ValueError(
                f"{self._name}(resume=...): the suspended lanes are those of another function or info, or of other "
                f"items. They have the arrays {', '.join(got)}, and this function's have {', '.join(expected)}."
            )
        indices = np.asarray(at.indices)
        is_busy = indices != NO_ITEM
        self._in_lanes = {int(index) % NUMBERS: int(index) for index in indices[is_busy]}
        numbers = np.where(is_busy, indices % NUMBERS, NO_ITEM).astype(np.int32)
        inside = jax.tree.structure(self._state.inside).unflatten(at.inside)
        self._state = jax.device_put(self._state._replace(item=numbers, inputs=list(at.inputs), inside=inside))

    def report(self) -> StreamReport:
        items, *counts = self._counts
        return StreamReport(items, self.num_lanes, *counts, seconds=self._seconds)

    # ---- chunks

    def _start(self) -> bool:
        """Start a chunk with the items that are there; false where there is nothing to run."""
        free = self.num_lanes - len(self._in_lanes)
        (first_item, block), self._block = self._block or (None, None), None
        # The items that were placed are used where no other comes first, and enough lanes are free.
        if not (block and self.waiting[0] is first_item and free >= block.first):
            if not self._fill() and not self._in_lanes:
                return False
            block = self._place(free)
        program = self.program
        given = [self.waiting.popleft() for _ in range(sum(block.counts))]
        is_last = self.items.is_empty and not self.waiting
        has_more = bool(self.waiting) or (not is_last and len(self.items.fetched) > 0)
        rows = self._rounds if is_last else len(block.counts) or 1
        wanted = self._places if is_last else 1
        counts = (np.int32(len(block.counts)), np.int32(rows), np.bool_(has_more), np.int32(wanted))
        item_rows = ItemRows(block.numbers, block.inputs, *counts)
        shared = [*program.made.shared, *self.function_arrays]
        start = time.perf_counter()
        self._began = start if self._began is None else self._began
        self._state, found = program.run(self._state, shared, item_rows, np.int32(self._pace.steps))
        self.running = found, given, block.counts, start, is_last
        return True

    def _collect(self) -> tuple[list[int], np.ndarray, list[jax.Array]]:
        """Wait for the chunk that is running; returns which items are done, at which of its places, and all outputs."""
        found, given, counts, start, is_last = self.running
        was_done = found.iterations.is_ready()
        chunk = jax.device_get(found._replace(outputs=[]))
        self.running = None  # an interrupt of the wait loses nothing
        ended = time.perf_counter()
        self._seconds = ended - (self._began or ended)
        rows, iterations, useful = int(chunk.rows), int(chunk.iterations), int(chunk.useful)
        self._pace.measured(iterations, ended - start, at_most=was_done)
        begun = sum(counts[:rows])
        self.num_begun += begun
        self._in_lanes.update((index % NUMBERS, index) for index, _ in given[:begun])
        self.waiting.extendleft(reversed(given[begun:]))
        numbers = chunk.finished[: rows + 1]
        done = numbers != NO_ITEM
        indices = [self._in_lanes.pop(number) for number in numbers[done].tolist()]
        # An item that is lost would let the stream wait for ever.
        assert len(self._in_lanes) == self.num_lanes - chunk.free
        fed = (0, 0) if is_last else (iterations, useful)
        counts = (len(indices), iterations, useful, *fed)
        self._counts = [old + new for old, new in zip(self._counts, counts, strict=True)]
        return indices, done, found.outputs

    def _prepare(self) -> None:
        """Place the items of the next chunk while the device runs, where they are all there."""
        self._fill()
        if len(self.waiting) >= self._most_items(self._places):
            block = self._place(self._places)
            numbers, inputs = jax.device_put((block.numbers, block.inputs))
            self._block = self.waiting[0], block._replace(numbers=numbers, inputs=inputs)

    def _place(self, free: int) -> Block:
        """The first items that wait, as many as a chunk takes, in rows, of which the first has `free` at most."""
        items = list(islice(self.waiting, self._most_items(free)))
        numbers = np.full((self._rounds, self._places), NO_ITEM, np.int32)
        inputs = [np.zeros((*numbers.shape, *aval.shape), aval.dtype) for aval in self.items.spec.avals]
        counts = [min(len(items), free, self._places)] if items else []
        while (left := len(items) - sum(counts)) > 0:
            counts.append(min(left, self._places))
        if items:
            at = np.repeat(np.arange(len(counts)), counts), np.concatenate([np.arange(count) for count in counts])
            numbers[at] = [index % NUMBERS for index, _ in items]
            for i, rows in enumerate(inputs):
                rows[at] = np.stack([arrays[i] for _, arrays in items])
        return Block(numbers, inputs, counts, free)

    def _most_items(self, free: int) -> int:
        """How many a chunk takes in rows of which the first has so many at most."""
        return min(free, self._places) + (self._rounds - 1) * self._places if free else 0

    def _fill(self) -> bool:
        """Take items that are there, as many as a chunk has room for; whether any wait for a lane."""
        room = self._most_items(self.num_lanes) if self._program else self.num_lanes
        self.waiting.extend(self.items.take(max(room - len(self.waiting), 0)))
        return bool(self.waiting)
