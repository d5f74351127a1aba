"""Compile programs, and time them in turn, so that whatever else the machine does hits all alike."""

import time
from collections.abc import Callable, Sequence
from math import inf
from statistics import median
from typing import Any, NamedTuple

import jax

ENOUGH_ROUNDS = 3  # where programs are slow (loops of small steps on an accelerator)


class Compiled(NamedTuple):
    """A compiled program with its arguments."""

    call: Callable[[], Any]  # returns when the results are there
    temporary_mib: float  # as the compiler reports it
    seconds: float  # to trace, lower and compile it


def compiled(function: Callable[..., Any], arguments: Sequence[Any], times: int = 1) -> Compiled:
    """Compile a program, as if nothing had been traced before; so many times, of which the least counts."""
    seconds, programs = [], []
    for _ in range(times):
        jax.clear_caches()
        start = time.perf_counter()
        programs = [jax.jit(function).lower(*arguments).compile()]
        seconds.append(time.perf_counter() - start)
    (program,) = programs
    analysis = program.memory_analysis()
    temporary = analysis.temp_size_in_bytes / 2**20 if analysis else 0.0
    return Compiled(lambda: jax.block_until_ready(program(*arguments)), temporary, min(seconds))


def interleaved(
    calls: Sequence[Callable[[], Any]], rounds: int, *, warm: bool = False, seconds: float = inf
) -> list[float]:
    """The median milliseconds of each call, which returns when its work is done; all are called in every round.

    With `warm`, each is called once more before it is timed: what ran before it, and how much memory that gave back,
    would matter else. After so many seconds, three rounds are enough.
    """
    times: list[list[float]] = [[] for _ in calls]
    begun = time.perf_counter()
    for i in range(rounds):
        if i >= ENOUGH_ROUNDS and time.perf_counter() - begun > seconds:
            break
        for call, of_call in zip(calls, times, strict=True):
            if warm:
                call()
            start = time.perf_counter()
            call()
            of_call.append(1e3 * (time.perf_counter() - start))
    return list(map(median, times))
