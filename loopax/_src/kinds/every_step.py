"""What the kinds that store something for every step have in common."""

from dataclasses import dataclass
from typing import ClassVar

from loopax._src.core import Cost, EveryCarry, EveryResidual, Kind, LoopFacts, NoReverseMode, Plan
from loopax._src.core.jaxpr.settings import costs

# `Lax`: the loop as `jax.lax` has it.


@dataclass(frozen=True)
class Lax(Kind):
    """Differentiate the loop as `jax.lax` does.

    Reverse mode works if the number of steps is fixed when the loop is traced. A gradient then stores what
    `jax.lax.scan` stores, and forward and gradient together evaluate the body n times. If the number of steps is not
    fixed, reverse mode is an error. Forward mode and `jax.vmap` always work. The loop needs no bound.
    """

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`."""
        if loop.is_fixed:
            return EveryResidual()
        return NoReverseMode(
            ValueError,
            "reverse mode through a loop of kind `Lax()` whose number of steps is not fixed when it is traced. "
            "Choose a kind that has it: `Checkpointed()` (some carries), or, with a static bound such as `max_steps=`, "
            "`Bounded()` (every carry) or `Residuals()` (what `jax.lax.scan` stores).",
        )


# A loose bound: a loop is expected to take this share of its steps. Rows are set to zero for all of them, so they may
# have no more than this share of the memory.
LOOSE_BOUND_STEPS = 1 / 2
LOOSE_BOUND_MEMORY = 1 / 8


def cost_of_rows(loop: LoopFacts, row_bytes: int, added: float, read_bytes: int = 0) -> Cost | None:
    """The cost of a row for every step, and of what is added to a step besides.

    Where more is read than stored, a step takes as long as if all of it was stored: XLA fuses less of it.
    """
    if loop.bound is None:
        return None
    stored = costs().storing(row_bytes, loop.bound * row_bytes) / (LOOSE_BOUND_STEPS if loop.bound_is_loose else 1)
    time = stored + costs().computed_byte * max(read_bytes - row_bytes, 0)
    memory = loop.bound * row_bytes / (LOOSE_BOUND_MEMORY if loop.bound_is_loose else 1)
    return Cost(memory, time + added)


# `Residuals`: what the derivative of every step needs is stored, and nothing evaluated again.


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


# `Bounded`: every carry is stored, and every step evaluated again for its derivative.


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
