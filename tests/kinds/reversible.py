"""A reversible kind, by public names alone: a gradient stores the last carry, and an inverse walks back from it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import loopax as lx
from loopax import kinds


@dataclass(frozen=True)
class Reversible(lx.Kind):
    """`inverse` takes what the body takes, with the carry after the step, and returns the carry before it."""

    inverse: Callable[..., Any] | None

    def plan(self, loop: kinds.LoopFacts) -> kinds.LastCarry:
        """Store the last carry."""
        del loop
        return kinds.LastCarry()

    def cost(self, loop: kinds.LoopFacts) -> kinds.Cost:
        """A step back evaluates the inverse, and the step for its derivative."""
        return kinds.Cost(loop.step.carry_bytes, time=2 * loop.step.evaluation, stored="the last carry")

    def without_functions(self) -> "Reversible":
        """What programs keep."""
        return replace(self, inverse=None)
