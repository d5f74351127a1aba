"""A stream as users see it: results one by one, suspended and resumed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import RLock
from types import TracebackType
from typing import Any, Self

import equinox as eqx
import numpy as np

from loopax._src.core import NO_ITEM
from loopax._src.jax_internals import api_boundary
from loopax._src.nnx.functional import thaw
from loopax._src.queues.pace import Pace
from loopax._src.queues.progress import Shown
from loopax._src.queues.stream_report import StreamReport
from loopax._src.queues.suspended import NO_ORDER, SuspendedStream
from loopax._src.queues.working_lanes import BusyLanes, Finished, WorkingLanes


class LanesStream(Iterator[Any]):
    """An iterator over the results of a stream. `lanes_stream` makes it.

    Several threads may take results of one stream: each result goes to one of them, and one waits for the other.
    """

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
        shown: Shown,
    ) -> None:
        """Prepare the stream. Nothing runs before the first result is asked for."""
        self._working = WorkingLanes(f, lanes, pace)
        self._lanes, self._ordered, self._throw, self._shown = lanes, ordered, throw, shown
        self._results: deque[tuple[int, Any, str | None]] = deque()
        self._held: dict[int, tuple[Any, str | None]] = {}  # until those before them are there
        self._next = 0  # the index of the next result, where they are ordered
        self._is_open = True
        self._one_at_a_time = RLock()  # the state of the lanes is donated to each chunk
        if resume is not None:
            self._resume(resume)
        self._working.fetch(items, ahead)

    def __iter__(self) -> Self:
        """Return the stream itself."""
        return self

    @api_boundary
    def __next__(self) -> Any:
        """Return the next result; wait until there is one."""
        with self._one_at_a_time:
            return self._next_result()

    def _next_result(self) -> Any:
        while not self._results:
            finished = self._look()
            if finished is None:
                self._working.raise_error()
                raise StopIteration
            self._finish(finished)
        index, result, message = self._results.popleft()
        if not self._throw:
            return index, result, message
        if message is not None:
            self.close()
            raise eqx.EquinoxRuntimeError(message)
        return index, result

    def __enter__(self) -> Self:
        """Return the stream itself. The end of the `with` block closes the stream."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the stream."""
        self.close()

    def close(self) -> None:
        """End the stream and free its memory. Results that have not been returned are lost."""
        self._working.fetch_no_more()  # a thread that waits for an item lets this one in
        with self._one_at_a_time:
            self._end()
            self._working.forget_error()

    def _end(self) -> None:
        self._is_open = False
        self._shown.end(self._working, finished=False)
        self._working.close()
        self._results.clear()
        self._held.clear()

    @api_boundary
    def suspend(self) -> SuspendedStream:
        """End the stream and return its state, for `lanes_stream(f, remaining_items, resume=state)`.

        The call waits for an item that is being fetched. If the iterable has raised an error that the stream has not
        reached yet, `next(stream)` raises it after the call.

        Raises
        ------
        ValueError
            The stream is closed.

        """
        with self._one_at_a_time:
            return self._suspended()

    def _suspended(self) -> SuspendedStream:
        if not self._is_open:
            raise ValueError("suspend(): the stream is closed. Suspend it before it ends, inside of its `with` block.")
        if self._working.is_running:
            self._finish(self._working.look(start_next=False))
        waiting = self._working.stop()
        at = self._working.busy()
        where, state, unfinished = np.full(self._lanes, NO_ITEM, np.int64), [], []
        if at is not None:
            where, state = at.indices, at.inside
            unfinished = [(int(where[i]), [x[i] for x in at.inputs]) for i in np.flatnonzero(where != NO_ITEM)]
        unfinished = [(index, self._as_given(arrays)) for index, arrays in (*unfinished, *waiting)]
        results = (*self._results, *((index, *found) for index, found in sorted(self._held.items())))
        following = self._results[0][0] if self._ordered and self._results else self._next
        following = following if self._ordered else NO_ORDER
        suspended = SuspendedStream(tuple(unfinished), where, state, results, self._working.items.count, following)
        self._end()
        return suspended

    def report(self) -> StreamReport:
        """Return what the lanes have done so far."""
        return self._working.report()

    def _look(self) -> Finished | None:
        """What the lanes have finished; None where nothing is left to do, and the stream is closed then."""
        if not self._is_open:
            return None
        self._shown.begin()
        try:
            finished = self._working.look()
        except Exception:
            self.close()
            raise
        if finished is None:
            self._shown.end(self._working, finished=True)
            self._end()
        else:
            self._shown.update(self._working)
        return finished

    def _finish(self, finished: Finished | None) -> None:
        """Items are done: their results."""
        if finished is None:
            return
        results = self._working.program.made.results
        for place, (index, error) in enumerate(zip(finished.indices, finished.errors, strict=True)):
            message = None if error < 0 else self._working.message(index, error)
            self._hand_out(index, thaw(results.unpack([np.array(x[place]) for x in finished.arrays])), message)

    def _hand_out(self, index: int, result: Any, message: str | None) -> None:
        """At once, or, if results are ordered, after those before it."""
        if not self._ordered:
            self._results.append((index, result, message))
            return
        self._held[index] = result, message
        while self._next in self._held:
            self._results.append((self._next, *self._held.pop(self._next)))
            self._next += 1

    def _as_given(self, arrays: list[Any]) -> Any:
        return thaw(self._working.items.spec.unpack([np.asarray(x) for x in arrays]))

    def _resume(self, suspended: SuspendedStream) -> None:
        """Go on where another stream was suspended."""
        where, items = np.asarray(suspended.lanes), self._working.items
        if self._ordered and suspended.next_result == NO_ORDER:
            raise ValueError(
                "lanes_stream(ordered=True, resume=...): the suspended stream has handed out results in the order in "
                "which they were finished. Go on with ordered=False."
            )
        self._next = max(int(suspended.next_result), 0)
        for index, result, message in suspended.results:
            self._hand_out(int(index), result, message)
        ready = [items.ready_again(int(index), item) for index, item in suspended.unfinished]
        items.count = int(suspended.fetched)
        busy = np.flatnonzero(where != NO_ITEM)
        self._working.wait_with(ready[len(busy) :])
        if len(busy):
            inputs = [np.zeros((self._lanes, *x.shape), x.dtype) for x in ready[0][1]]
            for lane, (_, arrays) in zip(busy, ready, strict=False):
                for rows, value in zip(inputs, arrays, strict=True):
                    rows[lane] = value
            self._working.go_on(BusyLanes(where, inputs, list(suspended.state)))
