"""A machine that carries out a schedule without computing anything, and checks every action."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from loopax._src.schedule.binomial import Action


class Cost(NamedTuple):
    """What a schedule costs: the result of `execute`.

    Attributes
    ----------
    evaluations
        All evaluations of steps, including those for derivatives.
    most_stored
        The most memory that carries and residuals take at any time.
    repetitions
        The most evaluations of one step before its derivative.

    """

    evaluations: int  # all of them, those for derivatives included
    most_stored: int  # carries and residuals, in units of memory
    repetitions: int  # the most that one step is evaluated before its derivative is due


class _Machine:
    """What is stored, and where the machine is."""

    def __init__(self, num_steps: int, carry: int, residuals: int) -> None:
        self.carries: set[int] = set()
        self.records: set[int] = set()
        self.current, self.to_reverse = 0, num_steps
        self.sizes = carry, residuals
        self.evaluated = Counter[int]()
        self.evaluations = 0

    @property
    def stored(self) -> int:
        carry, residuals = self.sizes
        return carry * len(self.carries) + residuals * len(self.records)

    def do(self, action: Action) -> None:
        step = action.step
        if not self._can(action):
            raise ValueError(f"{action} is not possible at step {self.current} with {sorted(self.carries)} stored")
        match action.name:
            case "keep":
                self.carries.add(step)
            case "restore":
                self.current = step
            case "advance" | "record":
                self.current += 1
                self.evaluated[step] += 1
                self.evaluations += 1
                self.records |= {step} if action.name == "record" else set()
            case "reverse":
                self.to_reverse -= 1
                self.evaluations += step not in self.records
                self.records.discard(step)
            case "drop":
                self.carries.remove(step)

    def _can(self, action: Action) -> bool:
        step = action.step
        is_current = step == self.current
        possible = {
            "keep": is_current and step not in self.carries,
            "restore": step in self.carries,
            "advance": is_current,
            "record": is_current and step not in self.records,
            "reverse": step == self.to_reverse - 1 and (is_current or step in self.records),
            "drop": step in self.carries,
        }
        return possible[action.name]


def execute(actions: Iterable[Action], num_steps: int, carry: int = 1, residuals: int = 1) -> Cost:
    """Execute a schedule for the gradient of `num_steps` steps, and return what it costs.

    Parameters
    ----------
    actions
        The actions of the schedule.
    num_steps
        The number of steps.
    carry, residuals
        The size of a carry, and of the residuals of a step.

    Returns
    -------
    Cost
        The evaluations, the most stored memory, and the most repetitions of a step.

    Raises
    ------
    ValueError
        - An action is not possible.
        - A step is not differentiated exactly once, from the last step to the first.
        - A carry or residuals are still stored at the end.

    """
    machine, most_stored = _Machine(num_steps, carry, residuals), 0
    for action in actions:
        machine.do(action)
        most_stored = max(most_stored, machine.stored)
    if machine.to_reverse or machine.stored:
        left = sorted(machine.carries | machine.records)
        raise ValueError(f"at the end {machine.to_reverse} steps are not differentiated, and {left} still stored")
    return Cost(machine.evaluations, most_stored, max(machine.evaluated.values(), default=0))
