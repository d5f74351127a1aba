"""The binomial schedule: the fewest evaluations for a given number of steps and of stored carries.

With c slots, n steps can be reversed such that none is advanced more than r times, where r is the
least number with n <= C(c + r, c) (Griewank & Walther 2000).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import comb
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# What a schedule consists of.


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


def evaluations(num_steps: int, slots: int) -> int:
    """Return the evaluations of the body, forward and gradient together, with the binomial schedule.

    The evaluations are the fewest among the schedules that store at most `slots` carries and no residuals, and
    evaluate each step again for its derivative (Griewank & Walther 2000).
    """
    return evaluations_from(list(starts(num_steps, slots)), num_steps, slots)


def evaluations_from(stored: Sequence[int], num_steps: int, slots: int) -> int:
    """Return the evaluations of the body if the forward pass has stored the carries before the steps `stored`.

    The forward pass evaluates each step once, and each derivative evaluates its step again. In addition, a segment of n
    steps between two stored carries takes r n - C(c + r, r - 1) evaluations. Here c is the number of slots that are
    free when the segment is reversed (Griewank & Walther 2000, Prop. 1).
    """
    ends = [*stored[1:], num_steps] if stored else []
    segments = (end - start for start, end in zip(stored, ends, strict=True))
    return 2 * num_steps + sum(_advances(steps, slots - used) for used, steps in enumerate(segments))


def _advances(num_steps: int, slots: int) -> int:
    if num_steps <= 1 or slots == 1:
        return num_steps * (num_steps - 1) // 2
    repetitions, _ = _repetitions(num_steps, slots, NOW)
    return repetitions * num_steps - comb(slots + repetitions, repetitions - 1)


def advance(num_steps: Any, slots: Any) -> Any:
    """Return how many steps to advance from a stored carry to the next carry to store.

    Parameters
    ----------
    num_steps
        The number of steps to reverse, at least 2.
    slots
        The number of free slots, at least 1, including the slot of the stored carry.

    Returns
    -------
    distance
        The steps to advance. With one slot: to the last step.

    Notes
    -----
    Takes Python integers, or int32 arrays of one element, which may be traced.

    The steps ahead have one slot less. The steps that are passed have all slots and one repetition less (Griewank &
    Walther 2000, Theorem 1).

    """
    if isinstance(num_steps, jax.Array) or isinstance(slots, jax.Array):
        steps, slots = (lax.convert_element_type(x, jnp.uint32) for x in (num_steps, slots))
        return lax.convert_element_type(_advance(steps, slots, COMPILED), jnp.int32)
    return _advance(num_steps, slots, NOW)


class _Arithmetic(NamedTuple):
    """Where integers are calculated: now in Python, or in the compiled program."""

    while_loop: Callable[..., Any]
    minimum: Callable[[Any, Any], Any]
    where: Callable[[Any, Any, Any], Any]


def _while_loop(goes_on: Callable[[Any], bool], body: Callable[[Any], Any], state: Any) -> Any:
    while goes_on(state):
        state = body(state)
    return state


NOW = _Arithmetic(_while_loop, min, lambda condition, a, b: a if condition else b)
COMPILED = _Arithmetic(lax.while_loop, jnp.minimum, jnp.where)


def _advance(num_steps: Any, slots: Any, arithmetic: _Arithmetic) -> Any:
    repetitions, below = _repetitions(num_steps, slots, arithmetic)
    ahead = _fraction(below, slots, slots + repetitions - 1)
    return arithmetic.where(slots == 1, num_steps - 1, arithmetic.minimum(below, num_steps - ahead))


def _repetitions(num_steps: Any, slots: Any, arithmetic: _Arithmetic) -> tuple[Any, Any]:
    """The least r with n <= C(c + r, c), and C(c + r - 1, c); with one slot, where r would be n - 1, (1, 1)."""

    def next_range(state: tuple[Any, Any]) -> Any:
        repetitions, below = state
        return _fraction(below, slots + repetitions, repetitions)

    def too_short(state: tuple[Any, Any]) -> Any:
        repetitions, below = state
        fits = below // repetitions <= num_steps // (slots + repetitions)  # else the next range may overflow
        return (slots > 1) & fits & (next_range(state) < num_steps)

    one = num_steps // num_steps
    return arithmetic.while_loop(too_short, lambda state: (state[0] + one, next_range(state)), (one, one))


def _fraction(value: Any, numerator: Any, denominator: Any) -> Any:
    """`value * numerator / denominator`, which is an integer, without the large product."""
    return value // denominator * numerator + value % denominator * numerator // denominator


def starts(num_steps: int, slots: int) -> Iterator[int]:
    """Yield the steps before which the forward pass stores its carry, for a known number of steps."""
    step = 0
    for free in range(slots, 0, -1):
        if step < num_steps:
            yield step
            step += advance(max(num_steps - step, 2), free)


def replay(stored: Sequence[int], num_steps: int, slots: int, records: bool = False) -> Iterator[Action]:
    """Yield the actions that reverse all steps, if the carries before the steps `stored` are stored.

    `advance` divides the last segment until the remaining steps fit into the free slots, or no slot is free. The
    carries of these steps are stored (their residuals, if `records` is True), and the steps are reversed. The file
    `core/lowering/sweep_slots.py` compiles the same schedule.
    """
    reverse_run = _record_run if records else _reverse_run
    kept, end = set(stored), num_steps
    while end > 0:
        step = max(kept)
        row = len(kept) - 1  # of the slot for the current carry; those before it are in use
        yield Action("restore", step)
        while row < slots and end - step > slots - row + 1:
            yield from _keep(step, kept)
            distance = advance(end - step, slots - row)
            yield from (Action("advance", step + i) for i in range(distance))
            step, row = step + distance, row + 1
        yield from reverse_run(step, end, kept)
        end = step


def _keep(step: int, kept: set[int]) -> Iterator[Action]:
    if step not in kept:
        kept.add(step)
        yield Action("keep", step)


def _reverse_run(start: int, end: int, kept: set[int]) -> Iterator[Action]:
    """Store the carries of these steps, but not the last one's, which is current when it is needed."""
    for step in range(start, end - 1):
        yield from _keep(step, kept)
        yield Action("advance", step)
    for step in reversed(range(start, end)):
        if step < end - 1:
            yield Action("restore", step)
        yield Action("reverse", step)
        if step in kept:
            kept.remove(step)
            yield Action("drop", step)


def _record_run(start: int, end: int, kept: set[int]) -> Iterator[Action]:
    """Store the residuals of these steps, but not the last one's, which are used at once."""
    if start in kept:
        kept.remove(start)
        yield Action("drop", start)
    yield from (Action("record", step) for step in range(start, end - 1))
    yield from (Action("reverse", step) for step in reversed(range(start, end)))


def binomial(num_steps: int, slots: int) -> Iterator[Action]:
    """Yield the actions of the binomial schedule, for a known number of steps and at most `slots` stored carries."""
    stored = list(starts(num_steps, slots))
    yield from forward([s for s in stored if s <= step] for step in range(num_steps))
    yield from replay(stored, num_steps, slots)


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
