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

from collections.abc import Callable, Iterable, Iterator, Sequence
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


# How far to advance: with Python integers, and in compiled loops.


def advance(num_steps: Any, slots: Any) -> Any:
    """Return how many steps to advance from a stored carry to the next carry to store.

    Takes Python integers, or int32 arrays of one element, which may be traced.

    Parameters
    ----------
    num_steps
        The number of steps to reverse, at least 2.
    slots
        The number of free slots, at least 1, including the slot of the stored carry. With one slot: to the last step.

    """
    compiled = isinstance(num_steps, jax.Array) or isinstance(slots, jax.Array)
    if compiled:
        num_steps, slots = (lax.convert_element_type(x, jnp.uint32) for x in (num_steps, slots))
    repetitions, below = _repetitions(num_steps, slots, lax.while_loop if compiled else _while_loop)
    # The steps that are passed have all slots and one repetition less: they are at most C(c + r - 1, c). The steps
    # ahead have one slot less (Griewank & Walther 2000, Theorem 1), and are at least C(c + r - 2, c - 1).
    ahead = _fraction(below, slots, slots + repetitions - 1)
    if compiled:
        distance = jnp.where(slots == 1, num_steps - 1, jnp.minimum(below, num_steps - ahead))
        return lax.convert_element_type(distance, jnp.int32)
    return num_steps - 1 if slots == 1 else min(below, num_steps - ahead)


def _repetitions(num_steps: Any, slots: Any, while_loop: Callable[..., Any]) -> tuple[Any, Any]:
    """The least r with n <= C(c + r, c), and C(c + r - 1, c); with one slot, where r would be n - 1, (1, 1)."""

    def next_range(state: tuple[Any, Any]) -> Any:
        repetitions, below = state
        return _fraction(below, slots + repetitions, repetitions)

    def too_short(state: tuple[Any, Any]) -> Any:
        repetitions, below = state
        fits = below // repetitions <= num_steps // (slots + repetitions)  # else the next range may overflow
        return (slots > 1) & fits & (next_range(state) < num_steps)

    one = num_steps // num_steps
    return while_loop(too_short, lambda state: (state[0] + one, next_range(state)), (one, one))


def _fraction(value: Any, numerator: Any, denominator: Any) -> Any:
    """`value * numerator / denominator`, which is an integer, without the large product."""
    return value // denominator * numerator + value % denominator * numerator // denominator


def _while_loop(goes_on: Callable[[Any], bool], body: Callable[[Any], Any], state: Any) -> Any:
    while goes_on(state):
        state = body(state)
    return state


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
            repetitions, _ = _repetitions(steps, free, _while_loop)
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
