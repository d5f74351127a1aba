"""A stream, from the host's side: it gives chunks items, and hands out what they found."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import TracebackType
from typing import Any, Self
from weakref import finalize

import equinox as eqx
import jax
import numpy as np

from loopax._src.core import NO_ITEM, ItemRows
from loopax._src.core.jaxpr.util import split_list
from loopax._src.frontend.raising import with_amount
from loopax._src.nnx.functional import freeze, thaw
from loopax._src.pytrees.leaves import pack
from loopax._src.queues.chunks import NUMBERS, Block, Chunk, Program, compiled, results_of
from loopax._src.queues.item_types import ItemTypes
from loopax._src.queues.pace import Pace
from loopax._src.queues.source import Source
from loopax._src.queues.stream_report import StreamReport
from loopax._src.queues.suspended import SuspendedStream


class LanesStream(Iterator[Any]):
    """Results of a stream as they come: see `lanes_stream`, which makes it."""

    def __init__(
        self,
        f: Callable[[Any], Any],
        items: Iterable[Any],
        lanes: int,
        ordered: bool,
        pace: Pace,
        ahead: int,
        throw: bool,
        resume: SuspendedStream | None,
    ) -> None:
        """Nothing is run before the first result is asked for."""
        self._function_arrays, self._function = pack(freeze(f))
        self._lanes, self._ordered, self._pace, self._throw = lanes, ordered, pace, throw
        self._waiting: deque[tuple[int, Any]] = deque()  # with their arrays
        self._in_lanes: dict[int, int] = {}  # by number: the index
        self._results: deque[tuple[int, Any, int]] = deque()
        self._held: dict[int, tuple[Any, int]] = {}  # until those before them are there
        self._next = 0  # the index of the next result, where they are ordered
        self._program: Program | None = None
        self._state: Any = None
        self._running: Any = None  # what a chunk will have found, and what it was given
        self._block: tuple[Any, Block] | None = None  # the first items that wait, and the first of them
        self._counts = [0] * 5  # items, iterations, useful, and the last two until the source ended
        self._began: float | None = None
        self._ended: float | None = None
        self._is_open = True
        self._items = ItemTypes()
        if resume is not None:
            self._resume(resume)
        self._source = Source(items, ahead, self._items.ready)
        self._stop = finalize(self, self._source.stop, wait=False)

    # ---- what a user does

    def __iter__(self) -> Self:
        """The stream itself."""
        return self

    def __next__(self) -> Any:
        """The next result; waits until there is one."""
        while not self._results:
            if not self._is_open or not self._look():
                self.close()
                self._source.raise_error()
                raise StopIteration
        index, result, error = self._results.popleft()
        message = None if error < 0 else self._message(index, error)
        if not self._throw:
            return index, result, message
        if message is not None:
            self.close()
            raise eqx.EquinoxRuntimeError(message)
        return index, result

    def __enter__(self) -> Self:
        """The stream itself, which is closed at the end."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End the stream: fetch no more, and let go of the lanes. What is not handed out is lost."""
        self._is_open = False
        self._stop()
        self._state = self._running = None
        for held in (self._results, self._held, self._waiting, self._in_lanes):
            held.clear()

    def suspend(self) -> SuspendedStream:
        """End the stream, and return what goes on as `lanes_stream(f, rest of the items, resume=...)`.

        An item that is being fetched is waited for.
        """
        if not self._is_open:
            raise ValueError("suspend(): the stream is closed. Suspend it before it ends, inside of its `with` block.")
        if self._running is not None:
            self._finish(*self._collect())
        self._waiting.extend(self._source.stop())
        where = np.full(self._lanes, NO_ITEM, np.int64)
        state, unfinished = [], []
        if self._state is not None:
            lane = jax.device_get(self._state)
            state = jax.tree.leaves(lane.inside)
            busy = np.flatnonzero(lane.item != NO_ITEM)
            where[busy] = [self._in_lanes[int(lane.item[i])] for i in busy]
            unfinished = [(int(where[i]), self._as_given([x[i] for x in lane.inputs])) for i in busy]
        unfinished += [(index, self._as_given(arrays)) for index, arrays in self._waiting]
        results = (*self._results, *((index, *found) for index, found in sorted(self._held.items())))
        following = self._results[0][0] if self._ordered and self._results else self._next
        suspended = SuspendedStream(tuple(unfinished), where, state, results, self._items.count, following)
        self.close()
        return suspended

    def report(self) -> StreamReport:
        """What the lanes have done so far."""
        items, iterations, useful, iterations_fed, useful_fed = self._counts
        seconds = (self._ended or 0.0) - (self._began or 0.0)
        return StreamReport(items, self._lanes, iterations, useful, iterations_fed, useful_fed, seconds)

    # ---- what the stream does

    def _look(self) -> bool:
        """Wait for the chunk that is running, and start the next one; false where nothing is left to do."""
        if self._running is None and not self._start(wait=True):
            return False
        finished = self._collect()
        self._start(wait=False)  # the device runs while results and items are made ready, and used
        self._finish(*finished)
        self._prepare()
        return True

    def _start(self, wait: bool) -> bool:
        """Start a chunk with the items that are there; false where there is nothing to run: with `wait`, for ever."""
        free = self._lanes - len(self._in_lanes)
        block = self._prepared_for(free)
        if block is None:
            while not self._fill() and not self._in_lanes:
                if self._source.is_empty or not wait:
                    return False
                self._source.wait()
            block = self._place(free)
        program = self._ready_program()
        given = [self._waiting.popleft() for _ in range(sum(block.counts))]
        is_last = self._source.is_empty and not self._waiting
        has_more = bool(self._waiting) or (not is_last and self._source.has_fetched)
        rows = program.rounds if is_last else len(block.counts) or 1
        wanted = program.places if is_last else 1
        counts = (np.int32(len(block.counts)), np.int32(rows), np.bool_(has_more), np.int32(wanted))
        item_rows = ItemRows(block.numbers, block.inputs, *counts)
        shared = [*program.made.shared, *self._function_arrays]
        start = time.perf_counter()
        self._began = start if self._began is None else self._began
        self._state, found = program.run(self._state, shared, item_rows, np.int32(self._pace.steps))
        self._running = found, given, block.counts, start, is_last
        return True

    def _collect(self) -> tuple[list[int], Chunk]:
        """Wait for the chunk that is running; returns the indices of the items that are done, and the chunk."""
        found, given, counts, start, is_last = self._running
        self._running = None
        chunk = results_of(found)
        self._ended = time.perf_counter()
        self._pace.measured(chunk.iterations, self._ended - start)
        begun = sum(counts[: chunk.rows])
        self._in_lanes.update((index % NUMBERS, index) for index, _ in given[:begun])
        self._waiting.extendleft(reversed(given[begun:]))
        indices = [self._in_lanes.pop(int(number)) for number in chunk.finished]
        # An item that is lost would let the stream wait for ever.
        assert len(self._in_lanes) == self._lanes - chunk.free
        done = (len(indices), chunk.iterations, chunk.useful)
        fed = (0, 0) if is_last else done[1:]
        self._counts = [old + new for old, new in zip(self._counts, (*done, *fed), strict=True)]
        return indices, chunk
    def _finish(self, indices: list[int], chunk: Chunk) -> None:
        """Items are done: the flags of their checks, and their results."""
        made = self._ready_program().made
        flags, arrays = split_list(chunk.results(), [len(made.messages)])
        for place, index in enumerate(indices):
            error = next((i for i, failed in enumerate(flags) if failed[place]), -1)
            result = thaw(made.results.unpack([np.array(x[place]) for x in arrays]))
            self._hand_out(index, result, error)

    def _hand_out(self, index: int, result: Any, error: int) -> None:
        """At once, or, if results are ordered, after those before it."""
        if not self._ordered:
            self._results.append((index, result, error))
            return
        self._held[index] = result, error
        while self._next in self._held:
            self._results.append((self._next, *self._held.pop(self._next)))
            self._next += 1

    def _prepare(self) -> None:
        """Place the items of the next chunk while the device runs, where they are all there."""
        self._fill()
        program = self._ready_program()
        full = program.most_items(program.places)
        if len(self._waiting) >= full:
            block = self._place(program.places)
            numbers, inputs = jax.device_put((block.numbers, block.inputs))
            self._block = self._waiting[0], block._replace(numbers=numbers, inputs=inputs)

    def _prepared_for(self, free: int) -> Block | None:
        """The items that were placed, where no other comes first, and enough lanes are free."""
        (first_item, block), self._block = self._block or (None, None), None
        is_next = block and self._waiting[0] is first_item and free >= block.first
        return block if is_next else None

    def _place(self, free: int) -> Block:
        """The first items that wait, as many as a chunk takes."""
        program = self._ready_program()
        return program.block(list(islice(self._waiting, program.most_items(free))), free)

    def _fill(self) -> bool:
        """Take items that are there, as many as a chunk has room for; whether any wait for a lane."""
        room = self._program.most_items(self._lanes) if self._program else self._lanes
        self._waiting.extend(self._source.take(max(room - len(self._waiting), 0)))
        return bool(self._waiting)

    def _ready_program(self) -> Program:
        """The compiled program, from the first item on."""
        if self._program is None:
            self._program = compiled(self._function, self._items.spec, self._lanes)
        if self._state is None:
            self._state = self._program.empty()
        return self._program

    def _as_given(self, arrays: list[Any]) -> Any:
        return thaw(self._items.spec.unpack([np.asarray(x) for x in arrays]))

    def _message(self, index: int, error: int) -> str:
        return f"item {index} of lanes_stream: {with_amount(self._ready_program().made.messages[error], None)}"

    def _resume(self, suspended: SuspendedStream) -> None:
        """Go on where another stream was suspended."""
        where = np.asarray(suspended.lanes)
        self._next = int(suspended.next_result)
        for index, result, error in suspended.results:
            self._hand_out(int(index), result, int(error))
        pairs = [self._items.ready_again(int(index), item) for index, item in suspended.unfinished]
        self._items.count = int(suspended.fetched)
        if not pairs:
            return
        busy = np.flatnonzero(where != NO_ITEM)
        self._waiting.extend(pairs[len(busy) :])
        if not len(busy):
            return
        self._ready_program()
        empty = self._state
        self._in_lanes = {index % NUMBERS: index for index, _ in pairs[: len(busy)]}
        numbers = np.where(where == NO_ITEM, NO_ITEM, where % NUMBERS).astype(np.int32)
        inputs = [np.array(x) for x in empty.inputs]
        for lane, (_, arrays) in zip(busy, pairs, strict=False):
            for rows, value in zip(inputs, arrays, strict=True):
                rows[lane] = value
        inside = jax.tree.structure(empty.inside).unflatten(suspended.state)
        self._state = jax.device_put(empty._replace(item=numbers, inputs=inputs, inside=inside))
