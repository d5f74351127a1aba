"""Fit the constants of `Costs`, so that `Auto` takes fast kinds: `python -m benchmarks.fit_costs`, in ten minutes.

Times of programs differ by a third from what any sum of constants predicts. So the choices are fitted, not the times:
what counts is how much slower than the fastest is the kind that looks best. Constants that look as good stay near
where they start.
"""

from math import exp
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import cost_programs
from benchmarks.auto import Choices
from loopax._src.settings import Costs, Settings, context

# Where the search starts: what programs of one operation take.
START = Costs(0.2, 0.4, 0.6, 0.15, 0.01, 0.08, 0.18, 0.5, 3.3, 60.0, 300.0)
NEAR = 0.03  # the price of a constant that is e times as large as at the start
UNSURE = 0.06  # kinds whose times differ by less are nearly as good as each other
TRIALS = 6000


class Choice(NamedTuple):
    """The kinds that fit in one budget: their cost is `slopes @ constants + rest`, in milliseconds."""

    milliseconds: np.ndarray  # measured
    slopes: np.ndarray
    rest: np.ndarray


def choices_of(program: cost_programs.Program) -> list[Choice]:
    """One for each budget with more than one kind."""
    context().set_global(Settings(costs=START))
    choices = Choices(program)
    kinds, times = choices.kinds, choices.milliseconds()
    measured = np.array([times[kind] for kind in kinds])

    def costs_with(constants: Costs) -> np.ndarray:
        context().set_global(Settings(costs=constants))
        jax.clear_caches()
        loop = Choices(program).loop
        steps = (loop.bound or 0) * 1e-6
        return np.array([steps * cost.time if (cost := kind.cost(loop)) else np.inf for kind in kinds])

    at_start = costs_with(START)
    larger = [START._replace(**{name: 1.5 * value}) for name, value in START._asdict().items()]
    slopes = np.stack([(costs_with(c) - at_start) / (0.5 * v) for c, v in zip(larger, START, strict=True)], axis=1)
    context().set_global(Settings(costs=START))
    groups = [[kinds.index(kind) for kind in choices.within(budget)] for budget in choices.budgets]
    rest = at_start - slopes @ np.array(START)
    return [Choice(measured[group], slopes[group], rest[group]) for group in groups if len(group) > 1]


def loss(choices: list[Choice], constants: np.ndarray, unsure: float = UNSURE) -> np.ndarray:
    """How much slower than the fastest kind is what looks best, for each choice."""
    found = []
    for choice in choices:
        cost = choice.slopes @ constants + choice.rest
        weight = np.exp((cost.min() - cost) / (unsure * choice.milliseconds.min()))
        found.append(weight @ (choice.milliseconds / choice.milliseconds.min() - 1) / weight.sum())
    return np.array(found)


def fitted(choices: list[Choice]) -> np.ndarray:
    """A random search over the logarithms of the constants."""
    start, random = np.array(START), np.random.default_rng(0)

    def objective(logs: np.ndarray) -> float:
        found = loss(choices, start * np.exp(logs))
        return found.mean() + 2 * (found**2).mean() + NEAR * (logs**2).mean()

    best = np.zeros(len(start))
    least = objective(best)
    for _ in range(TRIALS):
        step = random.normal(size=len(start)) * random.choice([0.05, 0.2, 0.6])
        trial = best + step * (random.random(len(start)) < 0.4)
        if (value := objective(trial)) < least:
            best, least = trial, value
    return start * np.exp(best)


def main() -> None:
    """Print what is fitted, and what is in use."""
    choices = [choice for program in cost_programs.to_fit() for choice in choices_of(program)]
    constants = fitted(choices)
    for name, value, used in zip(Costs._fields, constants, Costs(), strict=True):
        print(f"{name:15} {value:8.3g}   in use {used:8.3g}")
    for title, values in (("fitted", constants), ("in use", np.array(Costs()))):
        slower = 1 + loss(choices, values, exp(-20))
        print(f"{title}: median {np.median(slower):.2f}, mean {slower.mean():.2f}, worst {slower.max():.2f}")


if __name__ == "__main__":
    main()
