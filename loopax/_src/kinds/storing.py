"""The kinds that store carries, residuals, or nothing: `Lax`, `Residuals`, `Bounded` and `Checkpointed`."""

from dataclasses import dataclass
from typing import ClassVar

from loopax._src.core import Checkpoints, EveryCarry, EveryResidual, NoReverseMode, Plan
from loopax._src.core.ir.kind import Cost, Kind, LoopFacts
from loopax._src.core.ir.plan import DEFAULT_SLOTS, Blocks, BlocksThenResiduals
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.static import Why, positive_int
from loopax._src.schedule.blocks import LastSteps, block_size, last_steps
from loopax._src.settings import calibration

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

    def _where_steps_may_break(self) -> Kind:
        """As of a static length."""
        return Residuals()


# A loop is expected to take this share of its steps: where its bound is loose, and where lanes that have finished leave
# a batch. Rows are set to zero for all steps. With a loose bound, they may have no more than this share of the memory.
LOOSE_BOUND_STEPS = 1 / 2
EARLY_END_STEPS = 1 / 7
LOOSE_BOUND_MEMORY = 1 / 8


def _forward(loop: LoopFacts) -> float:
    """The time of a step on the way forward."""
    return loop.step.evaluation + loop.step.overhead


def _storing(loop: LoopFacts, row_bytes: float, rows: int) -> float:
    """The time in which a row is stored and read again, of so many rows."""
    # What the other loops store that share the memory goes through the same caches: groups of lanes, or lanes alone.
    row_bytes *= loop.lanes
    return calibration().storing(row_bytes, rows * row_bytes * loop.lanes_apart / loop.share)


def _cost_of_rows(loop: LoopFacts, row_bytes: int, derivative: float) -> Cost | None:
    """The cost of a row for every step, from which its derivative takes so long."""
    if loop.bound is None:
        return None
    taken = LOOSE_BOUND_STEPS if loop.bound_is_loose else 1
    taken *= EARLY_END_STEPS if loop.ends_early else 1
    stored = _storing(loop, row_bytes, loop.bound) / taken
    memory = loop.bound * row_bytes / (LOOSE_BOUND_MEMORY if loop.bound_is_loose else 1)
    return Cost(memory, _forward(loop) + derivative + stored)


# A step that writes rows of a large array in the carry: its derivative needs far less than a carry. Then residuals of
# all steps take less room than carries, and no version of the array is stored.
_FAR_LESS = 8


def residuals_in_place_of_carries(loop: LoopFacts, num_carries: int) -> EveryResidual | None:
    """Residuals of all steps, where they are far smaller than carries and take no more room than so many of these."""
    if loop.bound is None or not loop.writes_rows or not loop.sizes_are_known:
        return None
    carry, residuals = loop.step.carry_bytes, loop.residuals.stored_bytes
    if _FAR_LESS * residuals > carry or loop.bound * residuals > num_carries * carry:
        return None
    return EveryResidual(f"{residuals} bytes of residuals for each step, in place of carries of {carry}")


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
        residuals = loop.residuals
        return _cost_of_rows(loop, residuals.stored_bytes, residuals.derivative)


# `Bounded`: every carry is stored, and every step evaluated again for its derivative.


@dataclass(frozen=True)
class Bounded(Kind):
    """Store every carry, and recompute every step for its derivative.

    Forward and gradient together evaluate the body 2n times for n steps. The loop needs a static bound: `max_steps`,
    the rows of `xs`, or a static length.

    Where a step writes a small part of a large array in the carry, and its residuals are at most an eighth of a carry,
    these are stored in place of carries, and nothing is evaluated again.
    """

    needs_bound: ClassVar[bool] = True

    def plan(self, loop: LoopFacts) -> EveryCarry | EveryResidual:
        """See `Kind.plan`."""
        return residuals_in_place_of_carries(loop, loop.bound or 0) or EveryCarry()

    def cost(self, loop: LoopFacts) -> Cost | None:
        """See `Kind.cost`."""
        return _cost_of_rows(loop, loop.step.carry_bytes, loop.step.derivative)


# `Checkpointed`: some carries are stored, and the steps between them evaluated again.


_CHECKPOINTS = Why(
    "how much memory a gradient uses",
    "give the most carries that there is room for: one budget serves every number of steps",
)


@api_boundary
@dataclass(frozen=True)
class Checkpointed(Kind):
    """Store some carries, and recompute the steps between them.

    Here n is the number of steps taken, and N is a static bound: `max_steps`, the rows of `xs`, or a static length.

    - `Checkpointed()` with a bound stores about 2 sqrt(N) carries: the carry at the start of each block of steps, and
      the carries of one block. Forward and gradient together evaluate the body at most 3n times. Tiny carries: more
      carries are stored if they fit in 8 KiB.
    - `Checkpointed()` without a bound stores at most 64 carries.
    - `Checkpointed(c)` stores at most c carries, including the carries of a recomputed block. No bound is needed.

    Parameters
    ----------
    checkpoints
        The most carries that are stored: an int from 1 on. None: as above. A loop with fewer steps stores fewer
        carries.

    Raises
    ------
    TypeError
        `checkpoints` is not an int, or is traced.
    ValueError
        `checkpoints` is less than 1.

    Notes
    -----
    Evaluations with `Checkpointed(c)`:

    - The length is known when the loop starts (`fori_loop`, `scan` without `stop`): the binomial schedule, except in
      the next case. Its evaluations are the fewest among the schedules that store at most c carries and no residuals,
      and evaluate each step again for its derivative (Griewank & Walther 2000).
    - The number of steps n is static, and c is at least about 2 sqrt(n): blocks of steps, which evaluate the body at
      most 3n times. At 1000 steps, blocks need at most 2 % more evaluations than the binomial schedule for c up to 303,
      and 25 % more for c = 999.
    - The length is not known (`while_loop`, `scan` with `stop`): an online schedule after Stumm & Walther (2010). It
      needs at most 1.15 times the evaluations of the binomial schedule.

    docs/kinds.md has the evaluations of each case.

    Residuals: while steps are recomputed, their residuals are stored in place of carries if the residuals of a step
    take no more room than a carry. Each such step is evaluated once less (Maddison 2024). `explain` shows whether a
    loop does so.

    A step that writes a small part of a large array in the carry: if its residuals are at most an eighth of a carry,
    and those of all N steps take no more room than the carries would, residuals are stored and no step is recomputed.

    """

    checkpoints: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.checkpoints is not None:
            what = "Checkpointed(checkpoints=...)"
            number = positive_int(what, self.checkpoints, "stored carries", _CHECKPOINTS)
            object.__setattr__(self, "checkpoints", number)

    def __repr__(self) -> str:
        """Return the code that makes this object."""
        return "Checkpointed()" if self.checkpoints is None else f"Checkpointed(checkpoints={self.checkpoints})"

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`."""
        if plan := residuals_in_place_of_carries(loop, self._carries(loop) if loop.writes_rows else 0):
            return plan
        plan = Checkpoints(self.checkpoints, always_to_bound=loop.is_fixed)
        last = self._last_steps(loop)
        if last is None:
            return plan
        residuals = f"{loop.residuals.stored_bytes} bytes of residuals"
        if last.recorded == loop.bound:
            return EveryResidual(f"{residuals} for each step fit in {self.checkpoints} carries")
        assert loop.bound is not None
        blocks = Blocks.of(last.block, loop.bound - last.recorded, True, loop.residuals.stored_bytes)
        return BlocksThenResiduals(blocks, last.recorded, otherwise=plan)

    def _last_steps(self, loop: LoopFacts) -> LastSteps | None:
        """How to store residuals of the last steps on the way forward; None: there is no room, or it does not pay."""
        bound, count = loop.bound, self.checkpoints
        if not bound or count is None or not loop.is_fixed or count * count < 4 * bound or not loop.sizes_are_known:
            return None
        carry, residuals = loop.step.carry_bytes, loop.residuals.stored_bytes
        if not carry or _storing(loop, residuals, bound) > loop.step.evaluation:
            return None
        return last_steps(bound, count, carry, residuals)

    def cost(self, loop: LoopFacts) -> Cost:
        """See `Kind.cost`."""
        count, size, forward = self._carries(loop), loop.step.carry_bytes, _forward(loop)
        again = forward if size else 0.0  # from the carry before
        time = forward + again + loop.step.derivative + _storing(loop, size, count)
        look = calibration().look
        if look and loop.is_fixed and not self._has_known_lengths(loop):  # the other kinds' loops have
            time += 3 * look
        last = self._last_steps(loop)
        if last is not None and loop.bound:
            stored = _storing(loop, loop.residuals.stored_bytes, max(last.recorded, last.block))
            time = (2 - last.recorded / loop.bound) * forward + loop.residuals.derivative + stored
        return Cost(count * size, time, stored=f"{count} carries of {size} bytes")

    def _within(self, memory: int, loop: LoopFacts) -> "Checkpointed":
        """Return this kind if its carries fit into `memory` bytes, else one with as many checkpoints as fit."""
        size = loop.step.carry_bytes
        return self if self._carries(loop) * size <= memory else Checkpointed(memory // size)

    def _has_known_lengths(self, loop: LoopFacts) -> bool:
        """Whether all loops of the gradient have static lengths, where the loop has."""
        carry = loop.step.carry_bytes
        saving = self.plan(loop)._saving(bound=loop.bound, carry_bytes=carry, length_known=True, has_inverse=False)
        return saving is None or (isinstance(saving, Blocks) and saving.are_known)

    def _carries(self, loop: LoopFacts) -> int:
        """How many are stored, at most."""
        if self.checkpoints is not None:
            return self.checkpoints
        if loop.bound is None:
            return DEFAULT_SLOTS
        size = block_size(loop.bound, loop.step.carry_bytes, loop.is_fixed)
        return loop.bound if size == 1 else -(-loop.bound // size) + size
