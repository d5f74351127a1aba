"""The binomial schedule: the fewest evaluations for a given number of steps and of stored carries.

With c slots, n steps can be reversed such that none is advanced more than r times, where r is the
least number with n <= C(c + r, c) (Griewank & Walther 2000).

A slot may hold the residuals of a step in place of a carry (mixed checkpointing, Maddison 2024): they are what the
derivative of the step needs, so the step is not evaluated again for it. The best schedule comes from a dynamic
program, which is too slow for a loop that runs. With m_k(s) for the most steps of which none is evaluated more than k
times, it has m_k(s) = m_k(s - 1) + m_(k - 1)(s) and m_1(s) = s + 1, so m_k(s) = C(s + k, k): for each k the limits are
those of the binomial schedule. So carries are stored where `advance` says, and as soon as all steps that remain fit
into the free slots, their residuals are stored instead.

A loop records nothing on its way forward. It evaluates the steps of the last run twice, where the optimum evaluates
them once: for 1000 steps and 10, 20 or 44 slots at most 0.9 % more evaluations in all. With 500 slots, where half of
the steps are in the last run, it takes 2.0 evaluations a step, and the optimum 1.5.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import comb
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Action(NamedTuple):
    """One action of a schedule.

    A schedule runs on a machine with a current carry and a store of carries and residuals.

    Attributes
    ----------
    name : str
        What to do:

        - `"keep"`: store the current carry, which is the carry before `step`.
        - `"restore"`: make the stored carry before `step` the current carry.
        - `"advance"`: evaluate `step`.
        - `"record"`: evaluate `step`, and store its residuals.
        - `"reverse"`: differentiate `step`. If its residuals are stored, they are used and dropped. If not, `step` is
          evaluated, and the carry before it must be the current carry.
        - `"drop"`: free the stored carry before `step`.
    step : int
        The number of the step, from 0 on.

    """

    name: Literal["keep", "restore", "advance", "record", "reverse", "drop"]
    step: int


# How to divide the steps between a stored carry and the end: with Python integers, and in compiled loops.


class Division(NamedTuple):
    """Between which binomials the number of steps lies, n <= C(c + r, c), where c slots are free.

    With integers of Python, or with arrays of uint32, then for numbers of int32.
    """

    repetitions: Any  # r
    below: Any  # C(c + r - 1, c)

    def is_too_low(self, num_steps: Any, slots: Any) -> Any:
        """Whether r is too low for so many steps; never with one slot, where it counts for nothing."""
        num_steps, slots = _unsigned(num_steps, slots)
        fits = self.below // self.repetitions <= num_steps // (slots + self.repetitions)  # else the next may overflow
        return (slots > 1) & fits & (self.raised(slots).below < num_steps)

    def raised(self, slots: Any) -> "Division":
        """With r + 1."""
        (slots,) = _unsigned(slots)
        below = _fraction(self.below, slots + self.repetitions, self.repetitions)
        return Division(self.repetitions + 1, below)

    def parts(self, slots: Any) -> tuple["Division", "Division"]:
        """Those of the steps that are passed, with all slots, and of the steps ahead, with one slot less.

        No step that is passed is advanced more than r - 1 times (Griewank & Walther 2000, Theorem 1).
        """
        ahead = _fraction(self.below, slots, slots + self.repetitions - 1)  # C(c + r - 2, c - 1)
        return Division(self.repetitions - 1, self.below - ahead), Division(self.repetitions, ahead)

    def divided(self, num_steps: Any, slots: Any) -> "Divided":
        """How compiled loops divide so many steps, at least 2, of which r is not too low."""
        num_steps, slots = _unsigned(num_steps, slots)
        passed, ahead = self.parts(slots)
        distance = jnp.where(slots == 1, num_steps - 1, jnp.minimum(self.below, num_steps - ahead.below))
        return Divided(distance.astype(jnp.int32), passed, ahead)


def _unsigned(*numbers: Any) -> list[Any]:
    """Arrays as uint32."""
    return [x.astype(jnp.uint32) if isinstance(x, jax.Array) else x for x in numbers]


class Divided(NamedTuple):
    """How many steps to advance, and the divisions of both parts."""

    distance: Any
    passed: Division
    ahead: Division


def _fraction(value: Any, numerator: Any, denominator: Any) -> Any:
    """`value * numerator / denominator`, which is an integer, without the large product."""
    whole = value // denominator
    return whole * numerator + (value - whole * denominator) * numerator // denominator


def advance(num_steps: int, slots: int) -> int:
    """Return how many steps to advance from a stored carry to the next carry to store.

    Parameters
    ----------
    num_steps
        The number of steps to reverse, at least 2.
    slots
        The number of free slots, at least 1, including the slot of the stored carry. With one slot: to the last step.

    """
    if slots == 1:
        return num_steps - 1
    division = _division(num_steps, slots)
    return min(division.below, num_steps - division.parts(slots)[1].below)


def _division(num_steps: int, slots: int) -> Division:
    """With the least r."""
    division = Division(1, 1)
    while division.is_too_low(num_steps, slots):
        division = division.raised(slots)
    return division


def divisions(num_steps: Any, slots: Any) -> Division:
    """Those of compiled loops, for int32 arrays of one shape, with the least r."""

    def raised(division: Division) -> Division:
        too_low = division.is_too_low(num_steps, slots)
        return jax.tree.map(lambda new, old: jnp.where(too_low, new, old), division.raised(slots), division)

    ones = jnp.ones_like(num_steps, jnp.uint32)
    return lax.while_loop(lambda division: jnp.any(division.is_too_low(num_steps, slots)), raised, Division(ones, ones))


# The schedule as actions.


def binomial(length: int, checkpoints: int, records: bool = False) -> Iterator[Action]:
    """Yield the actions of the binomial schedule, for a known number of steps.

    Parameters
    ----------
    length
        The number of steps that the loop takes.
    checkpoints
        The most carries that are stored, at least 1.
    records
        Whether recomputed steps store their residuals in slots, in place of carries. The default is False.

    """
    stored = list(starts(length, checkpoints))
    yield from forward([s for s in stored if s <= step] for step in range(length))
    yield from replay(stored, length, checkpoints, records)


def starts(num_steps: int, slots: int) -> Iterator[int]:
    """Yield the steps before which the forward pass stores its carry, for a known number of steps."""
    step = 0
    for free in range(slots, 0, -1):
        if step < num_steps:
            yield step
            step += advance(max(num_steps - step, 2), free)


def forward(history: Iterable[Sequence[int]]) -> Iterator[Action]:
    """Yield the actions of a forward pass; `history[i]` are the steps whose carries are stored when step i is taken."""
    kept: set[int] = set()
    for step, stored in enumerate(history):
        for other in kept - set(stored):
            kept.remove(other)
            yield Action("drop", other)
        if step in stored:
            yield from _keep(step, kept)
        yield Action("advance", step)


def replay(stored: Sequence[int], length: int, checkpoints: int, records: bool = False) -> Iterator[Action]:
    """Yield the actions that reverse all steps, if the forward pass has stored the carries before the steps `stored`.

    `core/lowering/sweep_slots.py` compiles the same schedule.

    Parameters
    ----------
    stored
        The steps whose carries are stored, ascending; the first is 0.
    length
        The number of steps that the loop took.
    checkpoints
        The most carries that are stored.
    records
        Whether recomputed steps store their residuals in slots, in place of carries. The default is False.

    """
    kept, end = set(stored), length
    while end > 0:
        step = max(kept)
        row = len(kept) - 1  # of the slot for the current carry; those before it are in use
        yield Action("restore", step)
        # The last segment is divided until the steps that remain fit into the free slots, or none is free.
        while row < checkpoints and end - step > checkpoints - row + 1:
            yield from _keep(step, kept)
            distance = advance(end - step, checkpoints - row)
            yield from (Action("advance", step + i) for i in range(distance))
            step, row = step + distance, row + 1
        yield from _reverse_run(step, end, kept, records)
        end = step


def _keep(step: int, kept: set[int]) -> Iterator[Action]:
    if step not in kept:
        kept.add(step)
        yield Action("keep", step)


def _reverse_run(start: int, end: int, kept: set[int], records: bool) -> Iterator[Action]:
    """Store the carries or the residuals of these steps, but not the last one's, which are used at once."""
    if records and start in kept:
        kept.remove(start)
        yield Action("drop", start)
    for step in range(start, end - 1):
        if not records:
            yield from _keep(step, kept)
        yield Action("record" if records else "advance", step)
    for step in reversed(range(start, end)):
        if step < end - 1 and not records:
            yield Action("restore", step)
        yield Action("reverse", step)
        if step in kept:
            kept.remove(step)
            yield Action("drop", step)


# How many evaluations it takes, from formulas.


def evaluations(num_steps: int, slots: int, records: bool = False) -> int:
    """The evaluations of the body, forward and gradient together, for a known number of steps."""
    return evaluations_from(list(starts(num_steps, slots)), num_steps, slots, records)


def evaluations_from(stored: Sequence[int], num_steps: int, slots: int, records: bool = False) -> int:
    """The evaluations of the body if the forward pass has stored the carries before the steps `stored`.

    The forward pass evaluates each step once, and each derivative evaluates its step again; where replays record, just
    that of the last step of each run. In addition, a segment of n steps between two stored carries takes
    r n - C(c + r, r - 1) evaluations, where c slots are free when it is reversed (Griewank & Walther 2000, Prop. 1).
    """
    total = num_steps if records else 2 * num_steps
    for used, (start, end) in enumerate(pairwise([*stored, num_steps])):
        steps, free = end - start, slots - used
        if steps <= 1 or free == 1:
            total += steps * (steps - 1) // 2
        else:
            repetitions = _division(steps, free).repetitions
            total += repetitions * steps - comb(free + repetitions, repetitions - 1)
        total += _runs(steps, free) if records else 0
    return total


def _runs(num_steps: int, slots: int) -> int:
    """Into how many runs a segment is divided; not by recursion, which may be as deep as the segment is long."""
    known: dict[tuple[int, int], int] = {}
    pending = [(num_steps, slots)]
    while pending:
        steps, free = pending[-1]
        if steps <= free + 1:
            known[pending.pop()] = 1
        elif free == 1:
            known[pending.pop()] = steps - 1
        else:
            distance = advance(steps, free)
            parts = [(steps - distance, free - 1), (distance, free)]
            missing = [part for part in parts if part not in known]
            if missing:
                pending += missing
            else:
                known[pending.pop()] = sum(known[part] for part in parts)
    return known[num_steps, slots]
