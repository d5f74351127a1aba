"""A stream that can go on: what `suspend()` returns, and `lanes_stream(resume=...)` takes."""

from typing import Any, NamedTuple

import numpy as np

NO_ORDER = -1  # in the place of the next result


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
        `(index, result, error)` of each finished item whose result has not been returned. `error` is a message or None.
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
