"""Measure programs side by side, in turn, so that whatever else the machine does hits all alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import jax
import numpy as np

from loopax._src.command.table import in_words
from loopax._src.insight.timing import Compiled, compiled, interleaved


@dataclass(frozen=True)
class Contender:
    """A program in one library."""

    library: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] | None = None  # None: those of the program


@dataclass(frozen=True)
class Program:
    """What all contenders compute: the same results, or the table says so. The first contender is of loopax."""

    name: str
    contenders: Sequence[Contender]
    arguments: tuple[Any, ...] = ()
    steps: int | None = None  # of one run, where steps per second are of interest
    is_one: bool = True  # False: contenders compute different things, and their results are not compared


@dataclass(frozen=True)
class Measurement:
    """What one contender takes."""

    program: str
    library: str
    milliseconds: float | None = None  # median
    ratio: float | None = None  # to the first contender, of loopax; None where that one fails
    temporary_mib: float | None = None  # as the compiler reports it
    compile_seconds: float | None = None  # tracing included
    steps_per_second: float | None = None
    note: str = ""  # an error, or results that differ


def measure(program: Program, rounds: int, *, warm: bool = False, seconds: float = inf) -> list[Measurement]:
    """Compile all contenders, then run them in turn, round by round; one that fails is reported.

    The options are those of `interleaved`.
    """
    working: list[tuple[str, Compiled, str]] = []  # with a note
    failed: list[Measurement] = []
    expected = None
    for contender in program.contenders:
        try:
            found = compiled(contender.function, contender.arguments or program.arguments)
            result = found.call()
            note = _difference(result, expected) if program.is_one else ""
            working.append((contender.library, found, note))
        except Exception as error:  # noqa: BLE001 - a peer may raise anything, and the others are measured all the same
            failed.append(Measurement(program.name, contender.library, note=in_words(error)))
        else:
            expected = result if expected is None else expected
    times = interleaved([found.call for _, found, _ in working], rounds, warm=warm, seconds=seconds)
    has_first = bool(working) and working[0][0] == program.contenders[0].library
    first = times[0] if has_first else None
    rows = zip(working, times, strict=True)
    return [*(_measurement(program, *row, ms, first) for row, ms in rows), *failed]


def _difference(result: Any, expected: Any) -> str:
    """Nothing where both are the same to rounding."""
    if expected is None:
        return ""
    ours, theirs = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x)]) for x in (expected, result))
    if ours.shape != theirs.shape:
        return "another result"
    error = np.linalg.norm(ours - theirs) / max(np.linalg.norm(ours), 1e-30)
    return "" if error < _tolerance() else f"another result: {error:.1e} away"


def _tolerance() -> float:
    """Return the relative error that rounding may make: GPUs round the operands of products to ten bits and more."""
    return 1e-3 if jax.default_backend() == "cpu" else 1e-2


def _measurement(
    program: Program, library: str, found: Compiled, note: str, milliseconds: float, first: float | None
) -> Measurement:
    return Measurement(
        program.name,
        library,
        milliseconds,
        first and milliseconds / first,
        found.temporary_mib,
        found.seconds,
        program.steps and 1e3 * program.steps / milliseconds,
        note,
    )
