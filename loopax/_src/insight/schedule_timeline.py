"""A schedule over time: what is evaluated when, and what is stored from when to when."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from loopax._src.schedule.actions import Action


class Evaluation(NamedTuple):
    """One evaluation of the body, or a derivative from stored residuals; it takes one unit of time."""

    kind: Literal["forward", "replay", "derivative"]
    step: int
    time: int


class Stored(NamedTuple):
    """A stored carry, or the stored residuals of a step."""

    kind: Literal["carry", "residuals"]
    step: int  # the carry before it, or its residuals
    start: int  # from this time
    end: int  # to this time


class Timeline(NamedTuple):
    """All of them, in the order in which they begin (evaluations) and end (what is stored)."""

    evaluations: list[Evaluation]
    stored: list[Stored]


def timeline(actions: Iterable[Action]) -> Timeline:
    """When each action of a schedule happens; the first time that a step is evaluated is the forward pass."""
    found, passed = Timeline([], []), 0
    kept, recorded = dict[int, int](), dict[int, int]()
    for action in actions:
        time = len(found.evaluations)
        match action.name:
            case "advance" | "record":
                is_first = action.step == passed
                found.evaluations.append(Evaluation("forward" if is_first else "replay", action.step, time))
                passed += is_first
                if action.name == "record":
                    recorded[action.step] = time + 1
            case "reverse":
                found.evaluations.append(Evaluation("derivative", action.step, time))
                if action.step in recorded:
                    found.stored.append(Stored("residuals", action.step, recorded.pop(action.step), time))
            case "keep":
                kept[action.step] = time
            case "drop":
                found.stored.append(Stored("carry", action.step, kept.pop(action.step), time))
    return found
