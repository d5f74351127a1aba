"""What `Auto` foretells and takes, and what `Tuned` takes, for programs that nobody tuned for.

The programs are scans as people write them, ragged batches in both orders of gradient and batch, and random ones.
`python -m benchmarks.foretold FILE` writes the times of kinds for those that constants are fitted on
(`benchmarks/fit_costs.py`).
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import loopax as lx
from benchmarks import everyday
from benchmarks.drawn import drawn
from benchmarks.groups import Findings
from benchmarks.measure import Case, measure
from benchmarks.ragged_batches import BATCHES
from loopax._src.core import LoopFacts, Plan
from loopax._src.core.ir.lanes import group_sizes
from loopax._src.kinds import tuned

KINDS: dict[str, lx.Kind] = {"Residuals": lx.Residuals(), "Bounded": lx.Bounded(), "Checkpointed": lx.Checkpointed()}
ROUNDS = 15
FITTED, UNSEEN = range(400), range(500, 600)  # random programs
BUDGETS = 256 * 2**20, 4 * 2**20
ROOM = 2**34  # bytes, for each kind of all lanes
WAYS = "lockstep", "compact", "sequential"
ORDERS = "gradient of lanes", "lanes of gradients"


class Program(NamedTuple):
    """A value and a gradient, whose loops are of a kind."""

    name: str
    of: Callable[[Any], Callable[..., Any]]
    arguments: tuple[Any, ...]
    groups: tuple[tuple[float, int], ...] = ()  # of lanes: their share of all, and their steps; empty: all to the bound
    lanes: int = 1  # outside of the gradient


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


def random_ones(numbers: Iterable[int]) -> Iterator[Program]:
    """Those of these numbers."""
    for number in numbers:
        program = drawn(number)
        arguments = program.arguments()
        lengths = np.full(program.lanes, program.steps) if program.is_static else np.atleast_1d(arguments[3])
        how = lx.Compact() if program.order == "compact" else None
        lanes = program.lanes if program.order == "lanes of gradients" else 1
        yield Program(f"drawn/{number}", program.gradient, arguments, groups_of(lengths, how), lanes)


def groups_of(lengths: np.ndarray, how: lx.Compact | None) -> tuple[tuple[float, int], ...]:
    """The groups in which lanes of these lengths run, the longest first."""
    longest = np.sort(lengths)[::-1]
    if how is None:
        return ((1.0, int(longest[0])),)
    found, start = [], 0
    for number, size in group_sizes(how, len(longest)):
        for _ in range(number):
            found.append((size / len(longest), int(longest[min(start, len(longest) - 1)])))
            start += size
    return tuple(found)


def times(program: Program, kinds: dict[str, lx.Kind] = KINDS) -> dict[str, dict[str, float]]:
    """The milliseconds and MiB of each kind, all run in turn."""
    cases = [Case(name, program.of(kind), program.arguments) for name, kind in kinds.items()]
    found = measure(cases, ROUNDS).items()
    return {name: {"ms": round(one.milliseconds, 4), "mib": round(one.temporary_mib, 4)} for name, one in found}


# What `Auto` foretells and takes.


@dataclass(frozen=True)
class Asking(lx.Kind):
    """A kind that remembers what it was told of each loop."""

    told: list[LoopFacts] = field(default_factory=list, compare=False)

    def plan(self, loop: LoopFacts) -> Plan:
        """Some carries."""
        self.told.append(loop)
        return lx.Checkpointed().plan(loop)


def facts_of(program: Program, share: float = 1.0) -> LoopFacts | None:
    """Those of the outermost loop, of so many of the lanes; None: nothing is stored, or there is no bound."""
    asking = Asking()
    jax.make_jaxpr(program.of(asking))(*program.arguments)
    told = [facts for facts in asking.told if facts.bound]
    told = [facts for facts in told if np.isclose(facts.share, share)] or told
    return max(told, key=lambda facts: facts.step.evaluation * (facts.bound or 0), default=None)


def foretold(program: Program) -> dict[str, float]:
    """The milliseconds that the steps take with each kind, as its cost says."""
    total = dict.fromkeys(KINDS, 0.0)
    for share, steps in program.groups or ((1.0, 0),):
        facts = facts_of(program, share)
        assert facts is not None
        for name, ns in costs_of(facts, program).items():
            total[name] += 1e-6 * (steps or facts.bound or 0) * ns
    return total


def costs_of(facts: LoopFacts, program: Program) -> dict[str, float]:
    """The nanoseconds of a step with each kind."""
    facts = replace(facts, lanes=max(program.lanes, lx.Auto()._lanes(facts)))
    return {name: cost.time for name, kind in KINDS.items() if (cost := kind.cost(facts))}


def choices(programs: Iterable[Program], budget: int) -> list[dict[str, Any]]:
    """What `Auto` takes of what fits in so many bytes, beside each of these kinds."""
    found = []
    for program in programs:
        if (facts := facts_of(program)) is None:
            continue
        auto = lx.Auto(budget)
        kinds = {repr(kind): kind for kind in auto._candidates(facts)}
        plan = auto.plan(facts)
        taken = next(name for name, kind in kinds.items() if kind.plan(facts).because(plan.reason) == plan)
        ms = {name: one["ms"] for name, one in times(program, kinds).items()}
        fastest = min(ms, key=lambda name: ms[name])
        found.append(
            {
                "program": program.name,
                "Auto takes": taken,
                "ms": ms[taken],
                "the fastest that fits": fastest,
                "ms of it": ms[fastest],
                "Auto / the fastest": round(ms[taken] / ms[fastest], 2),
            }
        )
    return found


def beside_each_other(programs: Iterable[Program]) -> list[dict[str, Any]]:
    """What each kind is foretold to take, and takes."""
    found = []
    for program in programs:
        if facts_of(program) is None:
            continue
        expected, measured = foretold(program), times(program)
        call = time_of_a_call(program)
        found.append(
            {"program": program.name, "a call, ms": round(call, 4)}
            | {f"{name}, foretold ms": round(call + expected[name], 4) for name in expected}
            | {f"{name}, ms": measured[name]["ms"] for name in expected}
        )
    return found


def time_of_a_call(program: Program) -> float:
    """The milliseconds of a program without a loop that takes and returns arrays of the same types."""
    results = jax.eval_shape(program.of("auto"), *program.arguments)
    empty = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)
    return measure([Case("empty", empty, program.arguments)], ROUNDS)["empty"].milliseconds


def judged(rows: list[dict[str, Any]]) -> str:
    """How many times are within two, and how many pairs in order."""
    pairs = [{name: (row[f"{name}, foretold ms"], row[f"{name}, ms"]) for name in KINDS} for row in rows]
    ratios = np.array([expected / took for of in pairs for expected, took in of.values()])
    apart = [(a, b) for of in pairs for a in of.values() for b in of.values() if a[1] > 1.5 * b[1]]
    right = sum(a[0] > b[0] for a, b in apart)
    within = np.mean((ratios > 0.5) & (ratios < 2))
    return f"within two: {within:.0%} of {len(ratios)}; in order: {right} of {len(apart)} pairs"


# What `lanes="auto"` takes.


def of_lanes() -> list[dict[str, Any]]:
    """Ten ragged batches, forward and their gradients in both orders."""
    found = []
    for name, make in BATCHES.items():
        batch = make()
        for what in ("forward", *ORDERS):
            of = lambda lanes, w=what, b=batch: b.value(lanes=lanes) if w == "forward" else b.gradient(w, lanes=lanes)
            cases = [Case(lanes, of(lanes), batch.arguments) for lanes in (*WAYS, "auto")]
            ms = {lanes: one.milliseconds for lanes, one in measure(cases, ROUNDS).items()}
            found.append(
                {"batch": name, "what": what}
                | {f"{lanes}, ms": round(time, 3) for lanes, time in ms.items()}
                | {"auto / the best": round(ms["auto"] / min(ms[way] for way in WAYS), 2)}
                | {"auto / lockstep": round(ms["auto"] / ms["lockstep"], 2)}
            )
    return found


# What `Tuned` takes.


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


def of_tuned() -> list[dict[str, Any]]:
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


def of_num_lanes() -> list[dict[str, Any]]:
    """Gradients of the lanes of ten batches, whose number `Auto` and `Tuned` are told."""
    found = []
    for name, make in BATCHES.items():
        batch = make()
        told = {  # all kinds fit
            "Auto": lx.Auto(ROOM, batch.num_lanes),
            "Tuned": lx.Tuned(ROOM, num_lanes=batch.num_lanes),
        }
        of = lambda kind, b=batch: b.gradient("lanes of gradients", kind=kind, lanes="lockstep")
        cases = [Case(kind, of(how), batch.arguments) for kind, how in (KINDS | told).items()]
        ms = {kind: one.milliseconds for kind, one in measure(cases, ROUNDS).items()}
        fastest = min(ms[kind] for kind in KINDS)
        found.append(
            {"batch": name}
            | {f"{kind}, ms": round(time, 3) for kind, time in ms.items()}
            | {f"{kind} / the fastest": round(ms[kind] / fastest, 2) for kind in told}
        )
    return found


def tables() -> list[Findings]:
    """Of `Auto`, of lanes, and of `Tuned`."""
    everyone = lambda: [*scans(), *ragged(), *random_ones(UNSEEN[:10])]
    return [
        *(
            Findings(
                f"Auto: what it takes, {budget >> 20} MiB",
                lambda budget=budget: choices(everyone(), budget),
                "Bounds: median 1.05, worst 1.3.",
            )
            for budget in BUDGETS
        ),
        Findings(
            "Auto: what it foretells",
            lambda: beside_each_other([*scans(), *random_ones(UNSEEN)]),
            "Bounds: within two for 80 %; 95 % of the pairs that differ by 1.5 in order. No constant was fitted on "
            "these random programs; those on which they were are others of the same kind.",
        ),
        Findings("Auto: ways to run lanes", of_lanes, "Bounds: 1.2 of the best; 1.1 of lockstep."),
        Findings("Tuned: what it takes, and the seconds that it needs", of_tuned, "Bounds: 1.08; 2 s."),
        Findings("Lanes of gradients: with num_lanes", of_num_lanes, "Bounds: 1.3 for Auto, 1.08 for Tuned."),
    ]


def main() -> None:
    """Write the times of all programs, as they come."""
    file = Path(sys.argv[1])
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for program in (*scans(), *ragged(), *random_ones(FITTED)):
        if program.name not in found:
            found[program.name] = times(program)
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(program.name, found[program.name], flush=True)


if __name__ == "__main__":
    main()
