"""Items that come one by one through a fixed number of lanes: `lanes_stream`."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import RLock
from types import TracebackType
from typing import Any, NamedTuple, Self

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from loopax._src.core import NO_ITEM
from loopax._src.jax_internals import api_boundary, is_tracing
from loopax._src.nnx.functional import thaw
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.static import static_bool
from loopax._src.queues.working_lanes import WHY, BusyLanes, StreamReport, WorkingLanes

NO_ORDER = -1  # in the place of the next result


class StreamInfo(NamedTuple):
    """How the loop of an item ended; returned with `info=True`.

    Attributes
    ----------
    num_steps
        The steps that the loop took: an int.
    limit_reached
        Whether a limit stopped a loop that would have gone on, as in `LoopInfo`: a bool.
    error
        The error of the item, as a message. None: there was no error.

    """

    num_steps: int
    limit_reached: bool
    error: str | None


class SuspendedStream(NamedTuple):
    """The state of a suspended stream, for `lanes_stream(resume=...)`.

    A `SuspendedStream` is a pytree of NumPy arrays (JAX arrays for PRNG keys), ints and strings.

    Attributes
    ----------
    unfinished
        `(index, item)` of each unfinished item: the items in lanes, in the order of the lanes, then the items that wait
        for a lane.
    lanes : int64[lanes]
        The index of the item in each lane; -1 for an empty lane.
    state
        The state of each lane's loop.
    results
        `(index, result, error)` of each finished item whose result has not been returned. With `info=True`, `result` is
        the pair that the stream would return. `error` is a message or None.
    fetched
        The number of items that were taken from the iterable.
    next_result
        With `ordered=True`: the index of the next result. Otherwise -1.

    """

    unfinished: tuple[tuple[int, Any], ...]
    lanes: np.ndarray
    state: list[Any]
    results: tuple[tuple[int, Any, str | None], ...]
    fetched: int
    next_result: int


class LanesStream(Iterator[Any]):
    """An iterator over the results of a stream. `lanes_stream` makes it.

    Several threads may take results of one stream: each result goes to one of them, and one waits for the other.
    """

    def __init__(
        self, working: WorkingLanes, items: Iterable[Any], ordered: bool, throw: bool, resume: SuspendedStream | None
    ) -> None:
        """Prepare the stream. Nothing runs before the first result is asked for."""
        self._working, self._ordered, self._throw = working, ordered, throw
        self._results: deque[tuple[int, Any, str | None]] = deque()
        self._held: dict[int, tuple[Any, str | None]] = {}  # until those before them are there
        self._next = 0  # the index of the next result, where they are ordered
        self._is_open = True
        self._one_at_a_time = RLock()  # the state of the lanes is donated to each chunk
        if resume is not None:
            self._resume(resume)
        self._working.items.start(items)

    @api_boundary
    def __next__(self) -> Any:
        """Return the next result; wait until there is one."""
        with self._one_at_a_time:
            while not self._results:
                if not self._look():
                    self._working.items.raise_error()
                    raise StopIteration
            index, result, message = self._results.popleft()
            if self._throw and message is not None:
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
        self._working.items.stop(wait=False)  # a thread that waits for an item lets this one in
        with self._one_at_a_time:
            self._end()
            self._working.items.error = None

    def _end(self) -> None:
        self._is_open = False
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
            if not self._is_open:
                raise ValueError(
                    "suspend(): the stream is closed. Suspend it before it ends, inside of its `with` block."
                )
            if self._working.running is not None:
                self._look(start_next=False)
            waiting = [*self._working.waiting, *self._working.items.stop()]
            at = self._working.busy()
            where, state, items = np.full(self._working.num_lanes, NO_ITEM, np.int64), [], []
            if at is not None:
                where, state = at.indices, at.inside
                items = [(int(where[i]), [x[i] for x in at.inputs]) for i in np.flatnonzero(where != NO_ITEM)]
            unfinished = tuple(
                (index, thaw(self._working.items.spec.unpack([np.asarray(x) for x in arrays])))
                for index, arrays in (*items, *waiting)
            )
            results = (*self._results, *((index, *found) for index, found in sorted(self._held.items())))
            following = self._results[0][0] if self._results else self._next
            following = following if self._ordered else NO_ORDER
            suspended = SuspendedStream(unfinished, where, state, results, self._working.items.count, following)
            self._end()
            return suspended

    def report(self) -> StreamReport:
        """Return what the lanes have done so far."""
        return self._working.report()

    def _look(self, start_next: bool = True) -> bool:
        """Take what the lanes have finished; false where nothing is left to do, and the stream is closed then."""
        if not self._is_open:
            return False
        try:
            finished = self._working.look(start_next)
        except Exception:
            self.close()
            raise
        if finished is None:
            self._end()
            return False
        results = self._working.program.made.results
        for place, (index, message) in enumerate(zip(finished.indices, finished.errors, strict=True)):
            result = thaw(results.unpack([np.array(x[place]) for x in finished.arrays]))
            if finished.infos:
                num_steps, limit_reached = (x[place].item() for x in finished.infos)
                result = result, StreamInfo(num_steps, limit_reached, message)
            self._hand_out(index, result, message)
        return True

    def _hand_out(self, index: int, result: Any, message: str | None) -> None:
        """At once, or, if results are ordered, after those before it."""
        if not self._ordered:
            self._results.append((index, result, message))
            return
        self._held[index] = result, message
        while self._next in self._held:
            self._results.append((self._next, *self._held.pop(self._next)))
            self._next += 1

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
        ready = [items.ready(int(index), item) for index, item in suspended.unfinished]
        items.count = int(suspended.fetched)
        busy = np.flatnonzero(where != NO_ITEM)
        self._working.waiting.extend(ready[len(busy) :])
        if len(busy):
            inputs = [np.zeros((self._working.num_lanes, *x.shape), x.dtype) for x in ready[0][1]]
            for lane, (_, arrays) in zip(busy, ready, strict=False):
                for rows, value in zip(inputs, arrays, strict=True):
                    rows[lane] = value
            self._working.go_on(BusyLanes(where, inputs, list(suspended.state)))


@api_boundary
def lanes_stream(
    f: Callable[[Any], Any],
    items: Iterable[PyTree[Any]],
    *,
    num_lanes: int = 64,
    ordered: bool = False,
    chunk_steps: int | None = None,
    prefetch: int = 2,
    throw: bool = True,
    info: bool = False,
    resume: SuspendedStream | None = None,
    progress: ProgressLike = None,
) -> LanesStream:
    """Map a function that holds a loop over items that arrive one by one, with a fixed number of lanes.

    The meaning, apart from the order of results::

        for index, item in enumerate(items):
            yield index, f(item)

    Results come in the order in which items are finished. All lanes step together on the device. A lane that has
    finished an item takes the next item, while other lanes go on. Call `lanes_stream` from Python, not inside `jit`.

    Parameters
    ----------
    f
        The function: `f(item)` returns the result of one item. `f` holds exactly one loop of loopax, outside of `cond`,
        `scan` and other loops. The code before and after the loop runs once for each item. `f` is
        compiled once for any number of items, and streams of the same function share the program. If `f` is a pytree
        (an Equinox module, a `jax.tree_util.Partial`), streams with other arrays share the program, too.
    items
        The items: any iterable of pytrees, which may be endless or slow. All items have the structure, shapes and
        dtypes of the first. Python numbers become arrays of JAX's default dtype.
    num_lanes
        The number of items that are computed at a time: an int from 1 on. The default is 64.
    ordered
        Whether results come in the order of the items. True: a finished result waits in memory until all earlier
        results are finished. The default is False.
    chunk_steps
        The most steps between two times that the host collects results and hands over items. None: as many as take
        about 50 milliseconds. Results do not depend on it.
    prefetch
        How many items a thread fetches ahead, in multiples of `num_lanes`. 0: no thread; items are fetched when the
        caller asks for results. The default is 2.
    throw
        Whether the error of an item's loop (such as `max_steps` reached) is raised where its result would come. False:
        the stream yields the result that was reached, and continues.
    info
        Whether to yield `(index, (result, StreamInfo(num_steps, limit_reached, error)))` instead of `(index, result)`.
        The loop of `f` must then not be called inside of a `jax.jit` in `f`.
    resume
        The state of an earlier stream, as its `suspend()` returned it. `items` are then the items after those that the
        earlier stream has fetched. Lanes with an unfinished item keep the bound on their steps. Give the same `info`.
        None: a new stream.
    progress
        Whether to show finished items, items and steps per second, and busy lanes: True, or a `Progress(...)`. None:
        show nothing.

    Returns
    -------
    LanesStream
        An iterator over `(index, result)`, and a context manager. Leaves of results are NumPy arrays (JAX arrays for
        PRNG keys). `close()`, or the end of the `with` block, ends the stream and frees its memory. `suspend()` ends
        the stream and returns its state. `report()` counts what the lanes did.

    Raises
    ------
    TypeError
        - `f` is not callable, or `items` is not iterable.
        - An option has another type, or is traced.
        - An item has another structure, shape or dtype than the first item; the message names the item and the leaf.
    ValueError
        - `num_lanes` or `chunk_steps` is less than 1, or `prefetch` is negative.
        - `f` holds no loop, or several; or `info=True`, and its loop is called inside of a `jax.jit`.
        - `resume` belongs to a stream with another number of lanes.
        - An item differs from the first in a leaf that is not an array.
    equinox.EquinoxRuntimeError
        The loop of an item raised an error; the message names the item.

    Notes
    -----
    An error that the iterable raises is raised after the results of all earlier items.

    Memory: the state of all lanes, at most `(3 + prefetch) * num_lanes` items, and at most `2 * num_lanes` results.
    Memory does not grow with the number of items.

    There are no derivatives; `lanes_map` has them.

    The stream, including its thread, uses the settings of JAX (such as `jax.enable_x64`) that hold where the stream is
    made. A result has the same bits in every lane, if the device's operations on batches compute the same bits for
    every member.

    """
    if is_tracing():
        raise TypeError(
            "lanes_stream is called from Python, and cannot be called inside of `jax.jit`, `vmap`, `grad` or another "
            "transformation. Call it outside of them, or call `loopax.lanes_map` here, for items in one array."
        )
    info, more = static_bool("lanes_stream(info=...)", info, WHY), len(resume.unfinished) if resume else 0
    working = WorkingLanes("lanes_stream", f, items, num_lanes, chunk_steps, prefetch, progress, info, more)
    if resume is not None and len(resume.lanes) != num_lanes:
        raise ValueError(
            f"lanes_stream(resume=...): the suspended stream has {len(resume.lanes)} lanes, and num_lanes={num_lanes}. "
            f"Give num_lanes={len(resume.lanes)}."
        )
    return LanesStream(working, items, ordered, throw, resume)
