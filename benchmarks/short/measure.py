"""Measure programs side by side, in turn, so that whatever else the machine does hits all alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import jax
import numpy as np

from loopax._command.table import in_words
from loopax._src.insight.compare import Compiled, compiled, interleaved

# How large the measured programs are, and how often each runs: the sizes of all tables are chosen here.
#
# A step of a loop takes nanoseconds on a CPU and 10 to 50 microseconds on a GPU, where the host starts a kernel for
# each operation. So a loop of a million steps is a good measurement on a CPU, and takes a minute on a GPU. With
# `DEVICE` each program takes less than a second on a GPU, and all of `bench --device` less than twenty minutes.


@dataclass(frozen=True)
class Sizes:
    """The sizes of the programs, and the number of repetitions.

    Parameters
    ----------
    ode_steps, ode_bound
        The steps of the neural ODE, and the bound of its loop.
    sequences, longest, hidden
        The number of sequences of the recurrent network, the rows of the longest, and the units.
    lanes, most_steps
        The number of while loops in a batch, and the most steps that one of them takes.
    loop_steps, gradient_steps
        The steps of loops whose bodies are a few operations: forward, and where a gradient is taken.
    batch
        The lanes of batches of such loops.
    rounds
        How often each program is timed; the median counts.
    seconds
        After so many seconds three rounds are enough.
    warm
        Whether each program runs once, untimed, before each timed run.

    """

    ode_steps: int = 500
    ode_bound: int = 1000
    sequences: int = 128
    longest: int = 400
    hidden: int = 32
    lanes: int = 512
    most_steps: int = 1000
    loop_steps: int = 1_000_000
    gradient_steps: int = 100_000
    batch: int = 64
    rounds: int = 7
    seconds: float = inf
    warm: bool = False


PROCESSOR = Sizes()
DEVICE = Sizes(loop_steps=2000, gradient_steps=1000, batch=1024, rounds=5, seconds=15.0, warm=True)
QUICK = Sizes(
    ode_steps=5,
    ode_bound=9,
    sequences=40,
    longest=12,
    hidden=4,
    lanes=40,
    most_steps=9,
    loop_steps=32,
    gradient_steps=16,
    batch=4,
    rounds=1,
    warm=True,
)
BY_NAME = {"device": DEVICE, "quick": QUICK}
MINUTES = 20  # after which `bench --device` begins no further table


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


# Cells of tables.


def used_columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the headers and the rows without columns in which nothing stands."""
    used = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    return [headers[i] for i in used], [[row[i] for i in used] for row in rows]


def numbers(values: Sequence[tuple[float | None, str]]) -> list[str]:
    """Return each number in its format; nothing for None."""
    return ["" if value is None else format(value, how) for value, how in values]
