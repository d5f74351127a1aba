"""Items that come one by one through a fixed number of lanes: `lanes_stream`."""

from collections.abc import Callable, Iterable
from typing import Any

from jaxtyping import PyTree

from loopax._src.frontend.options import check_callable
from loopax._src.jax_internals import is_tracing
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.static_args import Why, positive_int
from loopax._src.queues.pace import Pace
from loopax._src.queues.progress import Shown
from loopax._src.queues.stream import LanesStream
from loopax._src.queues.suspended import SuspendedStream

_WHY = Why("how the stream is run", "choose one for the whole stream: results do not depend on it")


def lanes_stream(
    f: Callable[[Any], Any],
    items: Iterable[PyTree[Any]],
    *,
    lanes: int = 64,
    ordered: bool = False,
    chunk_steps: int | None = None,
    prefetch: int = 2,
    throw: bool = True,
    resume: SuspendedStream | None = None,
    progress: ProgressLike = None,
) -> LanesStream:
    """Map a function with a loop in it over items that come one by one, in a fixed number of lanes.

    The meaning::

        for index, item in enumerate(items):
            yield index, f(item)

    but in the order in which items are finished. All lanes step together on the device. A lane that has finished hands
    over its result and takes the next item, while the others go on. It is called from Python, not inside of `jit`.

    Parameters
    ----------
    f
        `f(item)` holds exactly one loop of loopax, outside of `cond`, `scan`, `jax.checkpoint` and other loops. What
        stands before and after it runs once for each item. It is compiled once for any number of items. Streams of one
        function share the program. Where `f` is a pytree (an Equinox module, a `jax.tree_util.Partial`), its arrays may
        differ.
    items
        Any iterable of pytrees, also endless, also slow. All are like the first: structure, shapes and dtypes. Python
        numbers become arrays, of JAX's dtype for them.
    lanes
        Items that are worked on at a time, an int from 1 on.
    ordered
        Hand results out in the order of the items. Those that are finished before an earlier one wait in memory.
    chunk_steps
        The most steps between two looks of the host at what is finished and what has come. Default: as many as take
        about 50 milliseconds. Results do not depend on it.
    prefetch
        How many items are fetched ahead, in multiples of `lanes`, by a thread of their own. 0: items are fetched where
        the stream is advanced, without a thread.
    throw
        Raise the error of an item's loop (`max_steps` reached, say) where its result would be handed out. False: hand
        out `(index, result, error)`, where `error` is a message or None.
    resume
        What `suspend()` of an earlier stream returned. `items` are those that come after. Lanes that have begun keep
        the bound on their steps.
    progress
        True, or a `Progress(...)`: show items that are finished, items and steps a second, and busy lanes.

    Returns
    -------
    LanesStream
        An iterator over `(index, result)`, and a context manager. The leaves of results are NumPy arrays (JAX's
        for PRNG keys). Leaving the
        `with` block, or `close()`, ends the stream and frees its memory. `suspend()` ends it, too, and returns what
        goes on elsewhere. `report()` says what the lanes did.

    Raises
    ------
    TypeError
        `f` is not callable, `items` is not iterable, an option has another type, or is traced; an item has another
        structure, shape or dtype than the first (the message names the item and the leaf).
    ValueError
        `lanes` or `chunk_steps` is less than 1, `prefetch` is negative; `f` holds no loop, or several; `resume` belongs
        to another number of lanes; an item differs in what is not an array.
    equinox.EquinoxRuntimeError
        The error of an item, which it names.

    Notes
    -----
    What `items` raises is raised here, after the results of all items before it. Memory: the state of all lanes, items
    of `(3 + prefetch) * lanes` and results of `2 * lanes`; it does not grow with the number of items. There are no
    derivatives; `lanes_map` has them. Settings of JAX, also for the thread, are those where the stream is made. The
    bits of a result do not depend on the lane, where the device's operations on batches are so.

    """
    check_callable("f of lanes_stream", f)
    lanes, chunk_steps = check_stream("lanes_stream", items, lanes, chunk_steps, prefetch)
    if resume is not None and len(resume.lanes) != lanes:
        raise ValueError(
            f"lanes_stream(resume=...): the suspended stream has {len(resume.lanes)} lanes, and lanes={lanes}. "
            f"Give lanes={len(resume.lanes)}."
        )
    if is_tracing():
        raise TypeError(
            "lanes_stream is called from Python, and cannot be called inside of `jax.jit`, `vmap`, `grad` or another "
            "transformation. Call it outside of them, or call `loopax.lanes_map` here, for items in one array."
        )
    shown = Shown("lanes_stream", progress, f, items, len(resume.unfinished) if resume else 0)
    return LanesStream(f, items, lanes, ordered, Pace(chunk_steps), prefetch * lanes, throw, resume, shown)


def check_stream(name: str, items: Any, lanes: Any, chunk_steps: Any, prefetch: Any) -> tuple[int, int | None]:
    """Understand the options of a stream: its lanes, and the steps of a chunk."""
    lanes = positive_int(f"{name}(lanes=...)", lanes, "lanes", _WHY)
    if chunk_steps is not None:
        chunk_steps = positive_int(f"{name}(chunk_steps=...)", chunk_steps, "steps", _WHY)
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise TypeError(f"{name}(prefetch=...): got {prefetch!r}, expected an int: multiples of `lanes`.")
    if prefetch < 0:
        raise ValueError(f"{name}(prefetch=...): got {prefetch}, expected 0 or more: multiples of `lanes`.")
    if not isinstance(items, Iterable):
        raise TypeError(f"{name}(items=...): got a {type(items).__name__}, expected an iterable of items.")
    return lanes, chunk_steps
