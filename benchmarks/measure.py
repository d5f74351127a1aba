"""Measure compiled programs side by side, in one run, so that the machine's mood hits all alike."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Case:
    """A program to measure."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Measurement:
    """What a program costs."""

    name: str
    milliseconds: float  # median of the rounds
    temporary_mib: float  # as the compiler reports it
    compile_seconds: float  # trace, lower and compile; the least of the repetitions


def measure(cases: Sequence[Case], rounds: int, compilations: int = 1) -> dict[str, Measurement]:
    """Measure all cases in turn, round by round.

    Each is called once before it is timed: what ran before it, and how much memory that gave back, would
    matter else.
    """
    compiled, seconds = {}, {}
    for case in cases:
        times = []
        for _ in range(compilations):
            jax.clear_caches()
            start = time.perf_counter()
            compiled[case.name] = jax.jit(case.function).lower(*case.arguments).compile()
            times.append(time.perf_counter() - start)
        seconds[case.name] = min(times)
        jax.block_until_ready(compiled[case.name](*case.arguments))
    times = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            jax.block_until_ready(compiled[case.name](*case.arguments))
            start = time.perf_counter()
            jax.block_until_ready(compiled[case.name](*case.arguments))
            times[case.name].append(1e3 * (time.perf_counter() - start))
    return {
        case.name: Measurement(
            case.name,
            statistics.median(times[case.name]),
            compiled[case.name].memory_analysis().temp_size_in_bytes / 2**20,
            seconds[case.name],
        )
        for case in cases
    }


def machine() -> str:
    """The machine in words."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = f"{names[0]} ({len(names)} logical cores)" if names else model
    return model
