"""A stream that can go on: what `suspend()` returns, and `lanes_stream(resume=...)` takes."""

from typing import Any, NamedTuple

import numpy as np


class SuspendedStream(NamedTuple):
    """A stream that can go on: a pytree of NumPy arrays and ints. Give it to `lanes_stream(resume=...)`.

    Attributes
    ----------
    unfinished
        `(index, item)` of the items that are in lanes, in the order of the lanes, and of those that wait for one.
    lanes : int64[lanes]
        The index of the item in each lane, -1 where there is none.
    state
        Where the lanes are in their loops.
    results
        `(index, result, error)` of the items that are finished and were not handed out; `error` is the number of the
        check that failed, or -1.
    fetched
        How many items were taken from the iterable.
    next_result
        With `ordered`, the index of the next result.

    """

    unfinished: tuple[tuple[int, Any], ...]
    lanes: np.ndarray
    state: list[Any]
    results: tuple[tuple[int, Any, int], ...]
    fetched: int
    next_result: int
