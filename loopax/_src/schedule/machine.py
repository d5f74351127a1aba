"""A machine that carries out a schedule without computing anything, and checks every action."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from loopax._src.schedule.actions import Action


class Cost(NamedTuple):
    """What a schedule costs."""

    advances: int
    most_stored: int
    repetitions: int  # the most that one step is advanced


def execute(actions: Iterable[Action], num_steps: int) -> Cost:
    """Carry out a schedule for the gradient of `num_steps` steps.

    Raises ValueError where an action is not possible, and where the schedule does not differentiate
    every step exactly once, from the last to the first, or leaves something stored.
    """
    stored: set[int] = set()
    current, to_reverse = 0, num_steps
    advances, most_stored = Counter[int](), 0
    for action in actions:
        _check(action, stored, current, to_reverse)
        match action.name:
            case "keep":
                stored.add(action.step)
                most_stored = max(most_stored, len(stored))
            case "restore":
                current = action.step
            case "advance":
                current += 1
                advances[action.step] += 1
            case "reverse":
                to_reverse -= 1
            case "drop":
                stored.remove(action.step)
    if to_reverse or stored:
        raise ValueError(f"at the end {to_reverse} steps are not differentiated, and {sorted(stored)} still stored")
    return Cost(advances.total(), most_stored, max(advances.values(), default=0))


def _check(action: Action, stored: set[int], current: int, to_reverse: int) -> None:
    """Whether the machine, in this state, can do this."""
    possible = {
        "keep": action.step == current and action.step not in stored,
        "restore": action.step in stored,
        "advance": action.step == current,
        "reverse": action.step == current == to_reverse - 1,
        "drop": action.step in stored,
    }
    if not possible[action.name]:
        raise ValueError(f"{action} is not possible at step {current} with {sorted(stored)} stored")
