"""Measure compiled programs side by side, in one run, so that the machine's mood hits all alike."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loopax._src.insight.compare import compiled, interleaved


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


ENOUGH_SECONDS = 120.0


def measure(cases: Sequence[Case], rounds: int, compilations: int = 1) -> dict[str, Measurement]:
    """Measure all cases in turn, round by round; slow ones in fewer rounds."""
    programs = []
    for case in cases:
        programs.append(compiled(case.function, case.arguments, compilations))
        programs[-1].call()
    times = interleaved([program.call for program in programs], rounds, warm=True, seconds=ENOUGH_SECONDS)
    return {
        case.name: Measurement(case.name, milliseconds, program.temporary_mib, program.seconds)
        for case, program, milliseconds in zip(cases, programs, times, strict=True)
    }


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What programs show of their progress goes nowhere."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
