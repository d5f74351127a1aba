"""Time programs in turn, so that whatever else the machine does hits all alike."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any


def interleaved(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """The median milliseconds of each call, which returns when its work is done; all are called in every round."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, of_call in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            of_call.append(1e3 * (time.perf_counter() - start))
    return list(map(median, times))
