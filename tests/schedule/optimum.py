"""The optimum of mixed checkpointing, a dynamic program (Maddison 2024), against which schedules of loops are measured.

In the arrays of `Optimum`, a row is an amount of free memory, and a column a number of steps. The state before the
first step is current. `current` are the evaluations if it is not stored, `stored` if it is stored, `ahead` if it stays
stored while later steps are reversed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from loopax.schedule import Action


class Optimum:
    """The schedules with the fewest evaluations, for up to `num_steps` steps, whose carries and residuals fit."""

    def __init__(self, num_steps: int, memory: int, carry: int = 1, residuals: int = 1) -> None:
        """Compare all first actions, for every number of steps and every amount of free memory."""
        self.carry, self.residuals = carry, residuals
        shape = (memory + 1, num_steps + 1)
        self.current, self.stored, self.ahead = (np.full(shape, np.inf) for _ in range(3))
        self.distance = np.zeros(shape, np.int64)
        self.current[:, :2] = self.stored[:, :2] = 0, 1
        for steps in range(2, num_steps + 1):
            # Evaluate some steps, reverse those behind them, and come back.
            distances = np.arange(1, steps)
            costs = distances + self.current[:, steps - distances] + self.stored[:, distances]
            self.ahead[:, steps], self.distance[:, steps] = costs.min(axis=1), distances[costs.argmin(axis=1)]
            self.current[:, steps] = np.minimum(self.record(steps), less_memory(self.ahead[:, steps], carry))
            dropped = less_memory(self.current[::-1, steps], carry)[::-1]
            self.stored[:, steps] = np.minimum(self.ahead[:, steps], dropped)

    def evaluations(self, num_steps: int, memory: int) -> float:
        """The fewest."""
        return float(self.current[memory, num_steps])

    def actions(self, num_steps: int, memory: int) -> Iterator[Action]:
        """Those of a schedule that takes as many."""
        yield from self.of_current(0, num_steps, memory) if num_steps else ()

    def record(self, steps: int) -> Any:
        """Where the residuals of the first step are stored."""
        return 1 + less_memory(self.current[:, steps - 1], self.residuals)

    def of_current(self, step: int, steps: int, memory: int) -> Iterator[Action]:
        if steps == 1:
            yield Action("reverse", step)
        elif self.record(steps)[memory] <= less_memory(self.ahead[:, steps], self.carry)[memory]:
            yield Action("record", step)
            yield from self.of_current(step + 1, steps - 1, memory - self.residuals)
            yield Action("reverse", step)
        else:
            yield Action("keep", step)
            yield from self.of_stored(step, steps, memory - self.carry)

    def of_stored(self, step: int, steps: int, memory: int) -> Iterator[Action]:
        while steps > 1 and self.ahead[memory, steps] <= self.stored[memory, steps]:
            distance = int(self.distance[memory, steps])
            yield from (Action("advance", step + i) for i in range(distance))
            yield from self.of_current(step + distance, steps - distance, memory)
            yield Action("restore", step)
            steps = distance
        yield Action("drop", step)
        yield from self.of_current(step, steps, memory + self.carry)


def less_memory(costs: Any, size: int) -> Any:
    """The costs with so much less free memory; infinite where there is too little."""
    return np.concatenate([np.full(min(size, len(costs)), np.inf), costs[: max(len(costs) - size, 0)]])
