"""The fastest way to store that fits in so much memory, chosen when a gradient is taken."""

from math import ceil
from sys import maxsize
from typing import Any, NamedTuple

from loopax._src.core.autodiff.partial_eval import partial_eval
from loopax._src.core.ir.kind import Checkpoints, EveryCarry, EveryResidual, Fastest, Storage
from loopax._src.core.ir.loop import Loop, LoopInputs
from loopax._src.core.jaxpr.cost import IN_CACHE, arithmetic, storing
from loopax._src.core.jaxpr.util import num_bytes, select, weakly_cached
from loopax._src.schedule.saving import DEFAULT_SLOTS, saved_carries

# A loose bound: a loop is expected to take this share of its steps. Rows are set to zero for all of them, so they may
# have no more than this share of the memory.
LOOSE_BOUND_STEPS = 1 / 2
LOOSE_BOUND_MEMORY = 1 / 8


class StepCost(NamedTuple):
    """What one step stores, in bytes, and what evaluating it costs."""

    carry: int  # the part that reverse mode needs
    residuals: int
    cost: float


def resolved(loop: Loop, unknown: LoopInputs) -> Loop:
    """The loop with a storage that says what to store; `unknown` marks consts, carry and xs."""
    return loop._replace(storage=choose(loop, unknown)) if isinstance(loop.storage, Fastest) else loop


@weakly_cached
def choose(loop: Loop, unknown: LoopInputs) -> Storage:
    """The storage for a loop of storage `Fastest`, with the reason."""
    assert isinstance(loop.storage, Fastest)
    if num_bytes(loop.body.in_avals) == maxsize:
        return Checkpoints(reason="sizes are not known when the loop is traced")
    asked, step = loop.storage, _step(loop, unknown)
    memory = asked.budget
    if step.carry > memory:
        least = ceil(step.carry / asked.share)
        raise ValueError(
            f"Auto(memory={asked.memory}): the gradient of this loop stores at least one carry, which has {least} "
            f"bytes (what the derivative needs of it). Give memory={least} or more; for n steps, about 2 sqrt(n) times "
            "as much makes it three to four times as fast."
        )
    if loop.bound is None:
        slots = DEFAULT_SLOTS if step.carry == 0 else min(DEFAULT_SLOTS, memory // step.carry)
        return Checkpoints(slots, reason=f"no static bound: {_carries(slots, step)}, of at most {memory} bytes")
    return _fastest(loop.storage, loop.bound, step)


def _step(loop: Loop, unknown: LoopInputs) -> StepCost:
    """Measure one step: evaluate the loop partially with carries stored, and with residuals stored."""
    by_carry = partial_eval(loop._replace(storage=EveryCarry()), unknown)
    carry = num_bytes(select(by_carry.states, by_carry.known.output_avals.carry))
    by_residual = partial_eval(loop._replace(storage=EveryResidual()), unknown)
    rows = by_residual.known.output_avals.ys[by_residual.num_known_ys :]
    read = num_bytes(by_carry.known.input_avals.xs)
    return StepCost(carry, num_bytes(rows), arithmetic(by_carry.known.body) + IN_CACHE * read)


def _fastest(asked: Fastest, bound: int, step: StepCost) -> Storage:
    """Compare the kinds by what they cost beyond one forward pass and the derivative, per step."""
    memory = asked.budget * (LOOSE_BOUND_MEMORY if asked.bound_is_loose else 1)
    share = LOOSE_BOUND_STEPS if asked.bound_is_loose else 1
    costs = {}
    for storage, size, evaluations in [(EveryResidual, step.residuals, 0), (EveryCarry, step.carry, 1)]:
        if bound * size <= memory:
            costs[storage] = storing(size, bound * size) / share + evaluations * step.cost
    costs[Checkpoints] = 2 * step.cost
    best: Any = min(costs, key=costs.__getitem__)
    reason = (
        f"at most {asked.budget} bytes for {bound} steps; added to a step, in bytes written and read: "
        + ", ".join(f"{_NAMES[storage]} {cost:.3g}" for storage, cost in costs.items())
    )
    if best is not Checkpoints:
        return best(reason=reason)
    default = saved_carries(bound, step.carry)
    if default * step.carry <= asked.budget:
        return Checkpoints(reason=f"{_carries(default, step)}, {reason}")
    count = asked.budget // step.carry
    return Checkpoints(count, reason=f"{_carries(count, step)}, {reason}")


_NAMES = {EveryResidual: "Residuals", EveryCarry: "Bounded", Checkpoints: "Checkpointed"}


def _carries(count: int, step: StepCost) -> str:
    return f"{count} carries of {step.carry} bytes"
