"""The optimum of mixed checkpointing, a dynamic program (Maddison 2024), against which schedules of loops are measured.

In the arrays of `Optimum`, a row is an amount of free memory, and a column a number of steps. The state before the
first step is current. `current` are the evaluations if it is not stored, `stored` if it is stored, `ahead` if it stays
stored while later steps are reversed.
"""

from typing import Any

import numpy as np


class Optimum:
    """The schedules with the fewest evaluations, for up to `num_steps` steps, whose carries and residuals fit."""

    def __init__(self, num_steps: int, memory: int, carry: int = 1, residuals: int = 1) -> None:
        """Compare all first actions, for every number of steps and every amount of free memory."""
        shape = (memory + 1, num_steps + 1)
        self.current, self.stored, self.ahead = (np.full(shape, np.inf) for _ in range(3))
        self.current[:, :2] = self.stored[:, :2] = 0, 1
        for steps in range(2, num_steps + 1):
            # Evaluate some steps, reverse those behind them, and come back.
            distances = np.arange(1, steps)
            self.ahead[:, steps] = (distances + self.current[:, steps - distances] + self.stored[:, distances]).min(1)
            recorded = 1 + less_memory(
                self.current[:, steps - 1], residuals
            )  # the residuals of the first step are stored
            self.current[:, steps] = np.minimum(recorded, less_memory(self.ahead[:, steps], carry))
            dropped = less_memory(self.current[::-1, steps], carry)[::-1]
            self.stored[:, steps] = np.minimum(self.ahead[:, steps], dropped)

    def evaluations(self, num_steps: int, memory: int) -> float:
        """The fewest."""
        return float(self.current[memory, num_steps])


def less_memory(costs: Any, size: int) -> Any:
    """The costs with so much less free memory; infinite where there is too little."""
    return np.concatenate([np.full(min(size, len(costs)), np.inf), costs[: max(len(costs) - size, 0)]])
