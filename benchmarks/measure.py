"""Measure compiled programs side by side, in one run, so that the machine's mood hits all alike."""

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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


ENOUGH_ROUNDS, ENOUGH_SECONDS = 3, 120.0


def measure(cases: Sequence[Case], rounds: int, compilations: int = 1) -> dict[str, Measurement]:
    """Measure all cases in turn, round by round.

    Each is called once before it is timed: what ran before it, and how much memory that gave back, would
    matter else. Where programs are slow (loops of small steps on an accelerator), three rounds are enough.
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
    times, start_of_all = {case.name: [] for case in cases}, time.perf_counter()
    for i in range(rounds):
        if i >= ENOUGH_ROUNDS and time.perf_counter() - start_of_all > ENOUGH_SECONDS:
            break
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


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What programs show of their progress goes nowhere."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def machine() -> str:
    """The machine in words: its processor, and the accelerators where there are some."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return _processor()
    return f"{len(devices)} x {devices[0].device_kind}, {_processor()}"


def _processor() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = f"{names[0]} ({len(names)} logical cores)" if names else model
    return model
