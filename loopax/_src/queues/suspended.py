"""A stream that can go on: what `suspend()` returns, and `lanes_stream(resume=...)` takes."""

from typing import Any, NamedTuple

import numpy as np

NO_ORDER = -1  # in the place of the next result


class SuspendedStream(NamedTuple):
    """A stream that can go on. Give it to `lanes_stream(resume=...)`.

    It is a pytree of NumPy arrays (JAX's for PRNG keys), ints and texts.

    Attributes
    ----------
    unfinished
        `(index, item)` of the items that are in lanes, in the order of the lanes, and of those that wait for one.
    lanes : int64[lanes]
        The index of the item in each lane, -1 where there is none.
    state
        Where the lanes are in their loops.
    results
        `(index, result, error)` of the items that are finished and were not handed out; `error` is a message or None.
    fetched
        How many items were taken from the iterable.
    next_result
        With `ordered`, the index of the next result; without, -1.

    """

    unfinished: tuple[tuple[int, Any], ...]
    lanes: np.ndarray
    state: list[Any]
    results: tuple[tuple[int, Any, str | None], ...]
    fetched: int
    next_result: int
