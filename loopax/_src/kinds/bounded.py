"""`Bounded`: every carry is stored, and every step evaluated again for its derivative."""

from dataclasses import dataclass
from typing import ClassVar

from loopax._src.core import Cost, EveryCarry, Kind, LoopFacts
from loopax._src.kinds.every_step import cost_of_rows


@dataclass(frozen=True)
class Bounded(Kind):
    """Store every carry, and recompute every step for its derivative.

    Forward and gradient together evaluate the body 2n times for n steps. The loop needs a static bound: `max_steps`,
    the rows of `xs`, or a static length.
    """

    needs_bound: ClassVar[bool] = True

    def plan(self, loop: LoopFacts) -> EveryCarry:
        """See `Kind.plan`."""
        del loop
        return EveryCarry()

    def cost(self, loop: LoopFacts) -> Cost | None:
        """See `Kind.cost`."""
        return cost_of_rows(loop, loop.step.carry_bytes, loop.step.evaluation + loop.step.carry_calls)
