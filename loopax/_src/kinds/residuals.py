"""`Residuals`: what the derivative of every step needs is stored, and nothing evaluated again."""

from dataclasses import dataclass
from typing import ClassVar

from loopax._src.core import Cost, EveryResidual, Kind, LoopFacts
from loopax._src.kinds.every_step import cost_of_rows


@dataclass(frozen=True)
class Residuals(Kind):
    """Store what the derivative of every step needs, as `jax.lax.scan` does; evaluate nothing again.

    A value that costs less to compute from others than to store is not stored: `1 - t` beside `t = tanh(x)`.

    Body evaluations for forward and gradient: n. Needs a static bound: `max_steps`, the rows of `xs`,
    or a static length.
    """

    needs_bound: ClassVar[bool] = True

    def plan(self, loop: LoopFacts) -> EveryResidual:
        """See `Kind.plan`."""
        del loop
        return EveryResidual()

    def cost(self, loop: LoopFacts) -> Cost | None:
        """See `Kind.cost`."""
        step = loop.step
        return cost_of_rows(loop, step.residual_bytes, step.residual_calls, step.read_bytes)
