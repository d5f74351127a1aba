"""`Residuals`: what the derivative of every step needs is stored, and nothing evaluated again."""

from dataclasses import dataclass
from typing import ClassVar

from loopax._src.core import Cost, EveryResidual, Kind, LoopFacts
from loopax._src.kinds.every_step import cost_of_rows


@dataclass(frozen=True)
class Residuals(Kind):
    """Store what the derivative of every step needs, as `jax.lax.scan` does; recompute no step.

    Forward and gradient together evaluate the body n times for n steps. The loop needs a static bound: `max_steps`, the
    rows of `xs`, or a static length.

    A value that is cheaper to compute from other residuals than to store is not stored, such as `1 - t` beside `t =
    tanh(x)`.
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
