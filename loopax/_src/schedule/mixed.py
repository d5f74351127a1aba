"""Mixed checkpointing: a slot holds a carry, or the residuals of a step (Maddison 2024, J. Comput. Sci. 82:102405).

Residuals are what the derivative of a step needs. A step whose residuals are stored is not evaluated again.

The optimum comes from a dynamic program, which is too slow for a loop that runs. There, `binomial.advance` says where
carries are stored, and as soon as all steps that remain fit into the free slots, their residuals are. Let m_k(s) be the
most steps of which none is evaluated more than k times. Then m_k(s) = m_k(s - 1) + m_(k - 1)(s) and m_1(s) = s + 1, so
m_k(s) = C(s + k, k): for each k the limits are those of the binomial schedule.

A loop records nothing on its way forward, so it evaluates the steps of the last run twice, where the optimum evaluates
them once. For 1000 steps and 10, 20 or 44 slots it takes at most 0.9 % more evaluations than the optimum. With 500
slots, where half of the steps are in the last run, it takes 2.0 evaluations a step, and the optimum 1.5.

In the arrays of `Optimum`, a row is an amount of free memory, and a column a number of steps. The state before the
first step is current. `_current` are the costs if it is not stored, `_stored` if it is stored, `_ahead` if it stays
stored while later steps are reversed.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from loopax._src.schedule.binomial import Action, advance, evaluations_from, forward, replay, starts


class Sizes(NamedTuple):
    """The memory of a carry, and of the residuals of a step, in any unit.

    Attributes
    ----------
    carry
        The size of a carry. The default is 1.
    residuals
        The size of the residuals of a step. The default is 1.

    """

    carry: int = 1
    residuals: int = 1


class Prices(NamedTuple):
    """The time of each action, in any unit.

    Attributes
    ----------
    evaluation
        The time to evaluate a step. The default is 1.
    carry
        The time to store a carry, or to read it. The default is 0.
    residuals
        The time to store the residuals of a step, or to read them. The default is 0.

    """

    evaluation: float = 1.0
    carry: float = 0.0  # storing one, or reading it
    residuals: float = 0.0


_EQUAL, _EVALUATIONS = Sizes(), Prices()


def mixed_evaluations(num_steps: int, slots: int) -> int:
    """Return the evaluations of the body, forward and gradient together, if recomputed steps store their residuals."""
    return mixed_evaluations_from(list(starts(num_steps, slots)), num_steps, slots)


def mixed_evaluations_from(stored: Sequence[int], num_steps: int, slots: int) -> int:
    """Return the evaluations of the body if the forward pass has stored the carries before the steps `stored`.

    Recomputed steps store their residuals. In each run of steps whose residuals are stored together, every step but the
    last is evaluated once less than with the binomial schedule.
    """
    ends = [*stored[1:], num_steps] if stored else []
    segments = (end - start for start, end in zip(stored, ends, strict=True))
    runs = sum(_runs(steps, slots - used) for used, steps in enumerate(segments))
    return evaluations_from(stored, num_steps, slots) - num_steps + runs


def _runs(num_steps: int, slots: int) -> int:
    """Into how many runs a segment is divided."""
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


def mixed(num_steps: int, slots: int) -> Iterator[Action]:
    """Yield the actions of a loop of known length that stores the residuals of recomputed steps in slots."""
    stored = list(starts(num_steps, slots))
    yield from forward([s for s in stored if s <= step] for step in range(num_steps))
    yield from replay(stored, num_steps, slots, records=True)


class Optimum:
    """The cheapest schedules that store carries or residuals, for up to `num_steps` steps and `memory`.

    A dynamic program finds them. Its time and memory grow with `num_steps` squared times `memory`.

    Parameters
    ----------
    num_steps
        The most steps.
    memory
        The most memory, in the unit of `sizes`.
    sizes
        The memory of a carry, and of the residuals of a step.
    prices
        The time of each action.

    """

    def __init__(self, num_steps: int, memory: int, sizes: Sizes = _EQUAL, prices: Prices = _EVALUATIONS) -> None:
        """Compare all first actions, for every number of steps and every amount of free memory."""
        self.sizes, self.prices = sizes, prices
        shape = (memory + 1, num_steps + 1)
        self._current, self._stored, self._ahead = (np.full(shape, np.inf) for _ in range(3))
        self._distance = np.zeros(shape, np.int64)
        self._current[:, :2] = self._stored[:, :2] = 0.0, prices.evaluation
        for steps in range(2, num_steps + 1):
            self._ahead[:, steps], self._distance[:, steps] = self._walk_ahead(steps)
            self._current[:, steps] = np.minimum(self._record(steps), self._keep(steps))
            dropped = _less_memory(self._current[::-1, steps], sizes.carry)[::-1]
            self._stored[:, steps] = np.minimum(self._ahead[:, steps], dropped)

    def cost(self, num_steps: int, memory: int) -> float:
        """Return the total price of the cheapest schedule."""
        return float(self._current[memory, num_steps])

    def actions(self, num_steps: int, memory: int) -> Iterator[Action]:
        """Yield the actions of the cheapest schedule."""
        yield from self._of_current(0, num_steps, memory) if num_steps else ()

    def _walk_ahead(self, steps: int) -> tuple[Any, Any]:
        """Evaluate some steps, reverse those behind them, and come back."""
        distances = np.arange(1, steps)
        costs = distances * self.prices.evaluation + self._current[:, steps - distances] + self._stored[:, distances]
        return costs.min(axis=1) + self.prices.carry, distances[costs.argmin(axis=1)]

    def _record(self, steps: int) -> Any:
        """Store the residuals of the first step."""
        behind = _less_memory(self._current[:, steps - 1], self.sizes.residuals)
        return behind + self.prices.evaluation + 2 * self.prices.residuals

    def _keep(self, steps: int) -> Any:
        """Store the state."""
        return _less_memory(self._ahead[:, steps], self.sizes.carry) + self.prices.carry

    def _of_current(self, step: int, steps: int, memory: int) -> Iterator[Action]:
        if steps == 1:
            yield Action("reverse", step)
        elif self._record(steps)[memory] <= self._keep(steps)[memory]:
            yield Action("record", step)
            yield from self._of_current(step + 1, steps - 1, memory - self.sizes.residuals)
            yield Action("reverse", step)
        else:
            yield Action("keep", step)
            yield from self._of_stored(step, steps, memory - self.sizes.carry)

    def _of_stored(self, step: int, steps: int, memory: int) -> Iterator[Action]:
        while steps > 1 and self._ahead[memory, steps] <= self._stored[memory, steps]:
            distance = int(self._distance[memory, steps])
            yield from (Action("advance", step + i) for i in range(distance))
            yield from self._of_current(step + distance, steps - distance, memory)
            yield Action("restore", step)
            steps = distance
        yield Action("drop", step)
        yield from self._of_current(step, steps, memory + self.sizes.carry)


def _less_memory(costs: Any, size: int) -> Any:
    """The costs with so much less free memory; infinite where there is too little."""
    return np.concatenate([np.full(min(size, len(costs)), np.inf), costs[: max(len(costs) - size, 0)]])
