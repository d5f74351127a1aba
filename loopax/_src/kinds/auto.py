"""`Auto`: the fastest of the other kinds that fits in so much memory."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from loopax._src.core import DEFAULT_SLOTS, Checkpoints, Cost, Kind, LoopFacts, Plan
from loopax._src.jax_internals import api_boundary
from loopax._src.kinds.storing import Bounded, Checkpointed, Residuals
from loopax._src.pytrees.static import Why, positive_int
from loopax._src.settings import settings

MEMORY = Why(
    "what a gradient stores", "give the most bytes that a gradient may take: one budget serves every number of steps"
)


@api_boundary
@dataclass(frozen=True)
class Auto(Kind):
    """Choose the fastest kind that fits in a memory budget (the default kind).

    `Auto` makes its choice where a gradient is traced, from:

    - the bound on the number of steps,
    - the types in the carry, and what the derivative of a step needs,
    - an estimate of the time of a step.

    With a bound, `Auto` takes `Residuals()`, `Bounded()` or `Checkpointed()`; the last with as many checkpoints as fit.
    Without a bound, `Auto` takes `Checkpointed()` with up to 64 checkpoints. A loop that is never differentiated runs
    as with `Lax()`. `explain` shows the choice and its reason.

    Parameters
    ----------
    memory
        The bytes that the gradient of one loop may store. None: those of `loopax.configure`, which are 256 MiB on every
        device if nothing is said.

    Raises
    ------
    TypeError
        `memory` is not an int, or is traced.
    ValueError
        `memory` is less than 1. Or, where a gradient is taken, `memory` is smaller than one carry; the message gives
        the size of the carry.

    Notes
    -----
    If the bound is `max_steps` and the length is known only at run time, the loop may take far fewer steps than the
    bound. `Residuals()` and `Bounded()` need room for all steps of the bound, so they then get an eighth of `memory`.

    Only shapes that the gradient sees count. A `jax.vmap` outside of the gradient multiplies what is stored.

    """

    memory: int | None = None
    _chooses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.memory is not None:
            object.__setattr__(self, "memory", positive_int("Auto(memory=...)", self.memory, "bytes", MEMORY))

    def __repr__(self) -> str:
        """Return the code that makes this object."""
        return "Auto()" if self.memory is None else f"Auto(memory={self.memory})"

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`."""
        if not loop.sizes_are_known:
            return Checkpoints(reason="sizes are not known when the loop is traced")
        costs, budget = self._candidates(loop), self._budget(loop)
        if loop.bound is None:
            ((checkpointed, cost),) = costs.items()
            return checkpointed.plan(loop).because(f"no static bound: {cost.stored}, of at most {budget} bytes")
        best = min(costs, key=lambda kind: costs[kind].time)
        listed = ", ".join(f"{_name(kind)} {cost.time:.0f}" for kind, cost in costs.items())
        reason = f"at most {budget} bytes for {loop.bound} steps; expected to add to a step, in nanoseconds: {listed}"
        return best.plan(loop).because(", ".join(filter(None, [costs[best].stored, reason])))

    def _candidates(self, loop: LoopFacts) -> dict[Kind, Cost]:
        """The kinds that fit in the memory, and what they cost."""
        budget = self._budget(loop)
        if loop.step.carry_bytes > budget:
            least = ceil(loop.step.carry_bytes / loop.share)
            raise ValueError(
                f"Auto(memory={self.memory}): the gradient of this loop stores at least one carry, which has {least} "
                f"bytes (what the derivative needs of it). Give memory={least} or more; for n steps, about 2 sqrt(n) "
                "times as much makes it three to four times as fast."
            )
        if loop.bound is None:
            kind = Checkpointed(DEFAULT_SLOTS)._within(budget, loop)
            return {kind: kind.cost(loop)}
        return fitting(loop, loop.bound, budget)

    def _budget(self, loop: LoopFacts) -> int:
        memory = settings().memory if self.memory is None else self.memory
        return int(memory * loop.share)


def fitting(loop: LoopFacts, bound: int, budget: int) -> dict[Kind, Cost]:
    """The kinds that fit in so many bytes, and what they cost."""
    kinds: list[Kind] = [Residuals(), Bounded(), Checkpointed()._within(budget, loop)]
    if loop.is_fixed and loop.step.carry_bytes and bound * loop.residuals.stored_bytes > budget:
        kinds.append(Checkpointed(min(budget // loop.step.carry_bytes, bound)))
    return {kind: cost for kind in kinds if (cost := kind.cost(loop)) and cost.memory <= budget}


def _name(kind: Kind) -> str:
    number = getattr(kind, "checkpoints", None)
    return type(kind).__name__ + ("" if number is None else f"({number})")
