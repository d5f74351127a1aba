"""`Checkpointed`: some carries are stored, and the steps between them evaluated again."""

from dataclasses import dataclass, replace

from loopax._src.core import Checkpoints, Cost, EveryResidual, Kind, LoopFacts, Plan
from loopax._src.core.jaxpr.costs import costs
from loopax._src.pytrees.static_args import Why, positive_int
from loopax._src.schedule.blocks import LastSteps
from loopax._src.schedule.saving import DEFAULT_SLOTS, Blocks, last_steps_of, saved_carries

_CHECKPOINTS = Why(
    "how much memory a gradient uses",
    "give the most carries that there is room for: one budget serves every number of steps",
)

# Rows of a block are few, and XLA calls operations on small arrays one after another: that costs half as much.
CALLS_OF_BLOCKS = 0.5


@dataclass(frozen=True)
class Checkpointed(Kind):
    """Store some carries, and evaluate the steps between them again.

    With a bound of N steps and without `checkpoints`, the carries at the start of blocks of steps and
    those of one block are stored: about 2 sqrt(N) in all (more where carries are so tiny that 8 KiB hold
    them). Forward and gradient evaluate the body at most 3 n times. N is `max_steps`, the rows of
    `xs`, or a static length.

    While steps are evaluated again, their residuals are stored in the place of carries if they take no
    more room: each such step is then evaluated once less (Maddison 2024). `explain` says whether they are.

    With `checkpoints` as many carries are stored, at most, those of a recomputed block included. A loop
    that knows its length when it starts (`fori_loop`, `scan` without `stop`) needs as few evaluations as
    are possible with carries alone (Griewank & Walther 2000), or fewer. One that does not (`while_loop`,
    `scan` with `stop`) needs at most 1.15 times as many (an online schedule after Stumm & Walther 2010),
    and no bound.

    Without a bound and without `checkpoints`, 64 carries are stored. docs/kinds.md has the
    evaluations of every case.

    Parameters
    ----------
    checkpoints
        The number of stored carries, an int from 1 on, or None. A loop with fewer steps stores fewer.

    Raises
    ------
    TypeError
        `checkpoints` is not an int, or is traced.
    ValueError
        `checkpoints` is less than 1.

    """

    checkpoints: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is not a number of carries."""
        if self.checkpoints is not None:
            what = "Checkpointed(checkpoints=...)"
            number = positive_int(what, self.checkpoints, "stored carries", _CHECKPOINTS)
            object.__setattr__(self, "checkpoints", number)

    def __repr__(self) -> str:
        """As a user writes it."""
        return "Checkpointed()" if self.checkpoints is None else f"Checkpointed(checkpoints={self.checkpoints})"

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`."""
        plan = Checkpoints(self.checkpoints, always_to_bound=loop.is_fixed)
        last = self._last_steps(loop)
        if last is None:
            return plan
        residuals = f"{loop.step.residual_bytes} bytes of residuals"
        if last.recorded == loop.bound:
            return EveryResidual(f"{residuals} for each step fit in {self.checkpoints} carries")
        return replace(plan, blocks=Blocks(last.block, loop.step.residual_bytes, last.recorded))

    def _last_steps(self, loop: LoopFacts) -> LastSteps | None:
        """How to store residuals of the last steps on the way forward; None: there is no room, or it does not pay."""
        bound, count = loop.bound, self.checkpoints
        if not bound or count is None or not loop.is_fixed or count * count < 4 * bound or not loop.sizes_are_known:
            return None
        carry, residuals = loop.step.carry_bytes, loop.step.residual_bytes
        if not carry or costs().storing(residuals, residuals * bound) > loop.step.evaluation:
            return None
        return last_steps_of(bound, count, carry, residuals)

    def cost(self, loop: LoopFacts) -> Cost:
        """See `Kind.cost`."""
        count, step = self._carries(loop), loop.step
        size = step.carry_bytes
        time = 2 * step.evaluation + step.step + costs().storing(size, count * size)
        time += CALLS_OF_BLOCKS * step.carry_calls
        last = self._last_steps(loop)
        if last is not None and loop.bound:
            residuals = max(step.residual_bytes, step.read_bytes)
            again = 1 - last.recorded / loop.bound
            stored = costs().storing(residuals, residuals * max(last.recorded, last.block))
            time = again * step.evaluation + stored + costs().call + step.residual_calls
        return Cost(count * size, time, stored=f"{count} carries of {size} bytes")

    def within(self, memory: int, loop: LoopFacts) -> "Checkpointed":
        """As it is, if its carries fit into so many bytes; else with as many checkpoints as do."""
        size = loop.step.carry_bytes
        return self if self._carries(loop) * size <= memory else Checkpointed(memory // size)

    def _carries(self, loop: LoopFacts) -> int:
        """How many are stored, at most."""
        if self.checkpoints is not None:
            return self.checkpoints
        return DEFAULT_SLOTS if loop.bound is None else saved_carries(loop.bound, loop.step.carry_bytes)
