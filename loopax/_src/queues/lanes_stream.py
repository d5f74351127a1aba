"""Items that come one by one through a fixed number of lanes: `lanes_stream`."""

from collections.abc import Callable, Iterable
from typing import Any

from jaxtyping import PyTree

from loopax._src.frontend.options import check_callable
from loopax._src.jax_internals import api_boundary, is_tracing
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.static_args import Why, positive_int
from loopax._src.queues.pace import Pace
from loopax._src.queues.progress import Shown
from loopax._src.queues.stream import LanesStream
from loopax._src.queues.suspended import SuspendedStream

_WHY = Why("how the stream is run", "choose one for the whole stream: results do not depend on it")


@api_boundary
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
        `scan`, `jax.checkpoint` and other loops. The code before and after the loop runs once for each item. `f` is
        compiled once for any number of items, and streams of the same function share the program. If `f` is a pytree
        (an Equinox module, a `jax.tree_util.Partial`), streams with other arrays share the program, too.
    items
        The items: any iterable of pytrees, which may be endless or slow. All items have the structure, shapes and
        dtypes of the first. Python numbers become arrays of JAX's default dtype.
    lanes
        The number of items that are computed at a time: an int from 1 on. The default is 64.
    ordered
        Whether results come in the order of the items. True: a finished result waits in memory until all earlier
        results are finished. The default is False.
    chunk_steps
        The most steps between two times that the host collects results and hands over items. None: as many as take
        about 50 milliseconds. Results do not depend on it.
    prefetch
        How many items a thread fetches ahead, in multiples of `lanes`. 0: no thread; items are fetched when the caller
        asks for results. The default is 2.
    throw
        Whether the error of an item's loop (such as `max_steps` reached) is raised where its result would come. False:
        the stream yields `(index, result, error)`, and `error` is a message or None.
    resume
        The state of an earlier stream, as its `suspend()` returned it. `items` are then the items after those that the
        earlier stream has fetched. Lanes with an unfinished item keep the bound on their steps. None: a new stream.
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
        - `lanes` or `chunk_steps` is less than 1, or `prefetch` is negative.
        - `f` holds no loop, or several.
        - `resume` belongs to a stream with another number of lanes.
        - An item differs from the first in a leaf that is not an array.
    equinox.EquinoxRuntimeError
        The loop of an item raised an error; the message names the item.

    Notes
    -----
    An error that the iterable raises is raised after the results of all earlier items.

    Memory: the state of all lanes, at most `(3 + prefetch) * lanes` items, and at most `2 * lanes` results. Memory does
    not grow with the number of items.

    There are no derivatives; `lanes_map` has them.

    The stream, including its thread, uses the settings of JAX (such as `jax.enable_x64`) that hold where the stream is
    made. A result has the same bits in every lane, if the device's operations on batches compute the same bits for
    every member.

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
