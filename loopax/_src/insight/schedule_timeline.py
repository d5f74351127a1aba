"""A schedule over time: what is evaluated when, and from when to when each carry is stored."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from loopax._src.schedule.actions import Action


class Evaluation(NamedTuple):
    """One evaluation of the body, which takes one unit of time."""

    kind: Literal["forward", "replay", "derivative"]
    step: int
    time: int


class StoredCarry(NamedTuple):
    """A stored carry."""

    step: int  # it is the one before this step
    start: int  # from this time
    end: int  # to this time


class Timeline(NamedTuple):
    """All of them, in the order in which they begin (evaluations) and end (stored carries)."""

    evaluations: list[Evaluation]
    stored: list[StoredCarry]


def timeline(actions: Iterable[Action]) -> Timeline:
    """When each action of a schedule happens; the first time that a step is advanced is the forward pass."""
    found, kept, passed = Timeline([], []), dict[int, int](), 0
    for action in actions:
        time = len(found.evaluations)
        match action.name:
            case "advance" if action.step == passed:
                found.evaluations.append(Evaluation("forward", action.step, time))
                passed += 1
            case "advance":
                found.evaluations.append(Evaluation("replay", action.step, time))
            case "reverse":
                found.evaluations.append(Evaluation("derivative", action.step, time))
            case "keep":
                kept[action.step] = time
            case "drop":
                found.stored.append(StoredCarry(action.step, kept.pop(action.step), time))
    return found
