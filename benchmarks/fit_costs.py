"""Fit the constants of `Costs` on measured times of kinds: `python -m benchmarks.fit_costs`, in an hour.

The times are those of `benchmarks/kinds-two-cores.json` (written by `python -m benchmarks.foretold`). What a kind is
foretold to take is to be near what it takes, and the kind that looks best to be as fast as the fastest. Of constants
that look as good, those stay that are near where the search starts.
"""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import foretold
from loopax._src.settings import Calibration, Costs, Settings, context

TIMES = Path(__file__).parent / "kinds-two-cores.json"
START = Costs()
UNSURE = 0.08  # kinds whose times differ by less are nearly as good as each other
CHOICES = 4.0  # how much a choice counts, beside a time
NEAR = 0.01  # the price of a constant that is e times as large as at the start
TRIALS = 20_000
LIKE_SCANS = 4  # what people write counts more than what is random


class Kinds(NamedTuple):
    """The kinds of one program: `slopes @ constants + rest` milliseconds are foretold."""

    measured: np.ndarray
    slopes: np.ndarray
    rest: np.ndarray
    weight: float
    is_foretold: bool  # else the number of steps is not that of the bound, and the choice alone counts


def kinds_of(program: foretold.Program, ms: dict[str, dict[str, float]]) -> Kinds | None:
    """What is known of a program; None where nothing is stored."""
    if foretold.facts_of(program) is None:
        return None

    def costs_with(constants: Costs) -> np.ndarray:
        context().set_global(Settings(calibration=Calibration(costs=constants)))
        found = foretold.foretold(program)
        return np.array([found[name] for name in foretold.KINDS])

    at_start = costs_with(START)
    larger = [START._replace(**{name: 1.5 * value}) for name, value in START._asdict().items()]
    slopes = np.stack([(costs_with(c) - at_start) / (0.5 * v) for c, v in zip(larger, START, strict=True)], axis=1)
    context().set_global(Settings(calibration=Calibration(costs=START)))
    measured = np.array([ms[name]["ms"] for name in foretold.KINDS])
    is_random, is_ragged = program.name.startswith("drawn"), program.name.startswith("ragged")
    weight = 1.0 if is_random else LIKE_SCANS
    return Kinds(measured, slopes, at_start - slopes @ np.array(START), weight, not is_ragged)


def losses(all_kinds: list[Kinds], constants: np.ndarray, unsure: float = UNSURE) -> tuple[np.ndarray, np.ndarray]:
    """The errors of times, as logarithms; and how much slower than the fastest kind is what looks best."""
    errors, slower = [], []
    for of in all_kinds:
        cost = np.maximum(of.slopes @ constants + of.rest, 1e-9)
        if of.is_foretold:
            errors += list(np.log(cost / of.measured))
        weight = np.exp((1 - cost / cost.min()) / unsure)
        slower.append(weight @ (of.measured / of.measured.min() - 1) / weight.sum())
    return np.array(errors), np.array(slower)


def fitted(all_kinds: list[Kinds]) -> np.ndarray:
    """A random search over the logarithms of the constants."""
    start, random = np.array(START), np.random.default_rng(0)
    weights = np.array([of.weight for of in all_kinds])

    def objective(logs: np.ndarray) -> float:
        errors, slower = losses(all_kinds, start * np.exp(logs))
        times = 2 * np.sqrt(1 + errors**2).mean()
        choices = np.average(slower + 2 * slower**2, weights=weights)
        return times + CHOICES * choices + NEAR * (logs**2).sum()

    best = np.zeros(len(start))
    least = objective(best)
    for _ in range(TRIALS):
        step = random.normal(size=len(start)) * random.choice([0.05, 0.2, 0.6])
        trial = best + step * (random.random(len(start)) < 0.3)
        if (value := objective(trial)) < least:
            best, least = trial, value
    return start * np.exp(best)


def main() -> None:
    """Print what is fitted, and what is in use."""
    times, all_kinds = json.loads(TIMES.read_text()), []
    programs = (*foretold.scans(), *foretold.ragged(), *foretold.random_ones(foretold.FITTED))
    for number, program in enumerate(programs):
        if program.name in times and (found := kinds_of(program, times[program.name])) is not None:
            all_kinds.append(found)
        if number % 20 == 0:
            jax.clear_caches()
    constants = fitted(all_kinds)
    for name, value, used in zip(Costs._fields, constants, START, strict=True):
        print(f"{name:16} {value:8.3g}   in use {used:8.3g}")
    for title, values in (("fitted", constants), ("in use", np.array(START))):
        errors, slower = losses(all_kinds, values, 1e-9)
        within = np.mean(np.abs(errors) < np.log(2))
        print(f"{title}: {within:.0%} of times within two; chosen / fastest: mean {1 + slower.mean():.3f}", end=", ")
        print(f"95 % {1 + np.percentile(slower, 95):.2f}, worst {1 + slower.max():.2f}")


if __name__ == "__main__":
    main()
