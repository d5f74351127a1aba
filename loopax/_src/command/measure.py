"""Measure programs side by side, in turn, so that whatever else the machine does hits all alike."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from loopax._src.command.table import in_words
from loopax._src.insight.timing import interleaved

ROUNDS = 7


@dataclass(frozen=True)
class Contender:
    """A program in one library."""

    library: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """What all contenders compute: the same results, or the table says so. The first contender is of loopax."""

    name: str
    contenders: Sequence[Contender]
    arguments: tuple[Any, ...]
    steps: int | None = None  # of one run, where steps per second are of interest


@dataclass(frozen=True)
class Measurement:
    """What one contender takes."""

    program: str
    library: str
    milliseconds: float | None = None  # median
    ratio: float | None = None  # to the first contender, of loopax
    temporary_mib: float | None = None  # as the compiler reports it
    compile_seconds: float | None = None  # tracing included
    steps_per_second: float | None = None
    note: str = ""  # an error, or results that differ


@dataclass(frozen=True)
class Compiled:
    """A contender that works."""

    library: str
    call: Callable[[], Any]
    temporary_mib: float
    compile_seconds: float
    note: str


def measure(program: Program, rounds: int = ROUNDS) -> list[Measurement]:
    """Compile all contenders, then run them in turn, round by round; one that fails is reported."""
    working: list[Compiled] = []
    failed: list[Measurement] = []
    expected = None
    for contender in program.contenders:
        try:
            compiled, result = _compile(program, contender, expected)
        except Exception as error:  # noqa: BLE001 - a peer may raise anything, and the others are measured all the same
            failed.append(Measurement(program.name, contender.library, note=in_words(error)))
        else:
            working.append(compiled)
            expected = result if expected is None else expected
    times = interleaved([compiled.call for compiled in working], rounds)
    rows = zip(working, times, strict=True)
    return [*(_measurement(program, compiled, ms, times[0]) for compiled, ms in rows), *failed]


def _compile(program: Program, contender: Contender, expected: Any) -> tuple[Compiled, Any]:
    jax.clear_caches()
    start = time.perf_counter()
    compiled = jax.jit(contender.function).lower(*program.arguments).compile()
    seconds = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    temporary = analysis.temp_size_in_bytes / 2**20 if analysis else 0.0

    def call() -> Any:
        return jax.block_until_ready(compiled(*program.arguments))

    result = call()
    return Compiled(contender.library, call, temporary, seconds, _difference(result, expected)), result


def _difference(result: Any, expected: Any) -> str:
    """Nothing where both are the same to rounding."""
    if expected is None:
        return ""
    ours, theirs = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x)]) for x in (expected, result))
    if ours.shape != theirs.shape:
        return "another result"
    error = np.linalg.norm(ours - theirs) / max(np.linalg.norm(ours), 1e-30)
    return "" if error < 1e-3 else f"another result: {error:.1e} away"


def _measurement(program: Program, compiled: Compiled, milliseconds: float, ours: float) -> Measurement:
    return Measurement(
        program.name,
        compiled.library,
        milliseconds,
        milliseconds / ours,
        compiled.temporary_mib,
        compiled.compile_seconds,
        program.steps and 1e3 * program.steps / milliseconds,
        compiled.note,
    )


def machine() -> str:
    """The machine and its devices in words."""
    info, model = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    devices = jax.devices()
    return f"{model}, {os.cpu_count()} logical cores; {len(devices)} x {devices[0].device_kind}"
