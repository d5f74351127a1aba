"""A machine that carries out a schedule without computing anything, and checks every action."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from loopax.schedule import Action


class Cost(NamedTuple):
    """What a schedule costs."""

    evaluations: int  # of steps, those for derivatives included
    most_stored: int  # carries and residuals at any time, in units of memory
    repetitions: int  # the most that one step is evaluated before its derivative is due


def execute(actions: Iterable[Action], num_steps: int, carry: int = 1, residuals: int = 1) -> Cost:
    """What the gradient of so many steps costs, where a carry and the residuals of a step have these sizes.

    It refuses an action that is not possible, and the end if a step was not differentiated, from the last to the first,
    or something is still stored.
    """
    carries, records, evaluated = set[int](), set[int](), Counter[int]()
    current, to_reverse, derivatives, most_stored = 0, num_steps, 0, 0
    for name, step in actions:
        stored = step in carries
        match name:
            case "keep":
                possible = step == current and not stored
                carries.add(step)
            case "restore":
                possible, current = stored, step
            case "advance" | "record":
                possible = step == current and not (name == "record" and step in records)
                current += 1
                evaluated[step] += 1
                records |= {step} if name == "record" else set()
            case "reverse":
                possible = step == to_reverse - 1 and (step == current or step in records)
                to_reverse -= 1
                derivatives += step not in records
                records.discard(step)
            case "drop":
                possible = stored
                carries.discard(step)
        if not possible:
            raise ValueError(f"{name} of step {step} is not possible at step {current}, with {sorted(carries)} stored")
        most_stored = max(most_stored, carry * len(carries) + residuals * len(records))
    if to_reverse or carries or records:
        left = sorted(carries | records)
        raise ValueError(f"at the end {to_reverse} steps are not differentiated, and {left} still stored")
    return Cost(evaluated.total() + derivatives, most_stored, max(evaluated.values(), default=0))
