"""What kinds take for programs that nobody tuned for, and what `Tuned` takes: `python -m benchmarks.foretold FILE`.

The file has the times of kinds for scans, ragged batches in both orders of gradient and batch, and random programs.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

import loopax as lx
from benchmarks import everyday
from benchmarks.drawn import drawn
from benchmarks.groups import Findings
from benchmarks.measure import Case, measure
from benchmarks.ragged_batches import BATCHES
from loopax._src.kinds import tuned

KINDS: dict[str, lx.Kind] = {"Residuals": lx.Residuals(), "Bounded": lx.Bounded(), "Checkpointed": lx.Checkpointed()}
ROUNDS = 15
RANDOM = 100
ORDERS = "gradient of lanes", "lanes of gradients"


class Program(NamedTuple):
    """A value and a gradient, whose loops are of a kind."""

    name: str
    of: Callable[[Any], Callable[..., Any]]
    arguments: tuple[Any, ...]


def scans() -> Iterator[Program]:
    """Twenty, and ten more."""
    for name, (program, arguments) in (everyday.TWENTY | everyday.TEN).items():
        of = lambda kind, program=program: jax.value_and_grad(program(partial(everyday.default, kind=kind)))
        yield Program(f"everyday/{name}", of, arguments)


def ragged() -> Iterator[Program]:
    """Ten batches, with lanes in lockstep and compact."""
    for name, make in BATCHES.items():
        batch = make()
        for lanes in ("lockstep", "compact"):
            for order in ORDERS:
                of = lambda kind, b=batch, order=order, lanes=lanes: b.gradient(order, kind=kind, lanes=lanes)
                yield Program(f"ragged/{name}/{lanes}/{order}", of, batch.arguments)


def random_ones() -> Iterator[Program]:
    """A hundred."""
    for number in range(RANDOM):
        program = drawn(number)
        yield Program(f"drawn/{number}", program.gradient, program.arguments())


def times(program: Program) -> dict[str, dict[str, float]]:
    """The milliseconds and MiB of each kind, all run in turn."""
    cases = [Case(name, program.of(kind), program.arguments) for name, kind in KINDS.items()]
    found = measure(cases, ROUNDS).items()
    return {name: {"ms": round(one.milliseconds, 4), "mib": round(one.temporary_mib, 4)} for name, one in found}


def taken_by_tuned(program: Program) -> tuple[set[str], float]:
    """What `Tuned` takes for the loops of a program, and the seconds that it needs for that."""
    tuned._process.clear()
    seconds = []
    for kind in (lx.Tuned(), lx.Auto()):
        jax.clear_caches()
        start = time.perf_counter()
        jax.make_jaxpr(program.of(kind))(*program.arguments)
        seconds.append(time.perf_counter() - start)
    return {choice.chosen.split("(")[0] for choice in tuned._process.values()}, seconds[0] - seconds[1]


def rows() -> list[dict[str, Any]]:
    """What `Tuned` takes, beside each kind: scans, and ragged batches in lockstep."""
    found = []
    for program in [*scans(), *(one for one in ragged() if "/lockstep/" in one.name)]:
        of_kinds = {name: one["ms"] for name, one in times(program).items()}
        chosen, seconds = taken_by_tuned(program)
        row: dict[str, Any] = {"program": program.name} | {f"{name}, ms": round(ms, 3) for name, ms in of_kinds.items()}
        row["Tuned takes"] = ", ".join(sorted(chosen))
        alike = [of_kinds[name] for name in chosen if name in of_kinds]
        row["Tuned / fastest"] = round(max(alike) / min(of_kinds.values()), 2) if len(chosen) == 1 and alike else ""
        row["s"] = round(seconds, 1)
        found.append(row)
    return found


def tables() -> list[Findings]:
    """One."""
    return [
        Findings("Tuned: what it takes, and the seconds that it needs", rows, "Bounds: 1.08; 2 s for small bodies.")
    ]


def main() -> None:
    """Write the times of all programs, as they come."""
    file = Path(sys.argv[1])
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for program in (*scans(), *ragged(), *random_ones()):
        if program.name not in found:
            found[program.name] = times(program)
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(program.name, found[program.name], flush=True)


if __name__ == "__main__":
    main()
