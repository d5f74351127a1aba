"""Measure programs side by side, in turn, so that whatever else the machine does hits all alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from loopax._src.command.table import in_words
from loopax._src.insight.timing import Compiled, compiled, interleaved

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


def measure(program: Program, rounds: int = ROUNDS) -> list[Measurement]:
    """Compile all contenders, then run them in turn, round by round; one that fails is reported."""
    working: list[tuple[str, Compiled, str]] = []  # with a note
    failed: list[Measurement] = []
    expected = None
    for contender in program.contenders:
        try:
            found = compiled(contender.function, program.arguments)
            result = found.call()
            working.append((contender.library, found, _difference(result, expected)))
        except Exception as error:  # noqa: BLE001 - a peer may raise anything, and the others are measured all the same
            failed.append(Measurement(program.name, contender.library, note=in_words(error)))
        else:
            expected = result if expected is None else expected
    times = interleaved([found.call for _, found, _ in working], rounds)
    rows = zip(working, times, strict=True)
    return [*(_measurement(program, *row, ms, times[0]) for row, ms in rows), *failed]


def _difference(result: Any, expected: Any) -> str:
    """Nothing where both are the same to rounding."""
    if expected is None:
        return ""
    ours, theirs = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x)]) for x in (expected, result))
    if ours.shape != theirs.shape:
        return "another result"
    error = np.linalg.norm(ours - theirs) / max(np.linalg.norm(ours), 1e-30)
    return "" if error < 1e-3 else f"another result: {error:.1e} away"


def _measurement(
    program: Program, library: str, found: Compiled, note: str, milliseconds: float, ours: float
) -> Measurement:
    return Measurement(
        program.name,
        library,
        milliseconds,
        milliseconds / ours,
        found.temporary_mib,
        found.seconds,
        program.steps and 1e3 * program.steps / milliseconds,
        note,
    )
