"""Asking a loop's kind for its plan, where a gradient is taken: here it is known what the derivative needs."""

from functools import partial
from sys import maxsize

from loopax._src.core.autodiff.partial_eval import partial_eval
from loopax._src.core.ir.facts import LoopFacts, StepFacts
from loopax._src.core.ir.kind import Asked
from loopax._src.core.ir.loop import Loop, LoopInputs
from loopax._src.core.ir.plan import EveryCarry, EveryResidual, Plan
from loopax._src.core.jaxpr.cost import IN_CACHE, arithmetic
from loopax._src.core.jaxpr.util import num_bytes, select, weakly_cached


def planned(loop: Loop, unknown: LoopInputs) -> Loop:
    """The loop with a plan as its storage."""
    return loop._replace(storage=plan_of(loop, unknown))


@weakly_cached
def plan_of(loop: Loop, unknown: LoopInputs) -> Plan:
    """What a gradient of the loop stores; `unknown` marks consts, carry and xs."""
    return loop.storage.planned(partial(_facts, loop, unknown))


def _facts(loop: Loop, unknown: LoopInputs, asked: Asked) -> LoopFacts:
    return LoopFacts(
        loop.bound,
        asked.is_fixed,
        asked.bound_is_loose,
        length_is_known=not loop.predicated,
        sizes_are_known=num_bytes(loop.body.in_avals) < maxsize,
        share=asked.share,
        measure=partial(_measure, loop, unknown),
    )


def _measure(loop: Loop, unknown: LoopInputs) -> StepFacts:
    """Measure one step: evaluate the loop partially with carries stored, and with residuals stored."""
    by_carry = partial_eval(loop._replace(storage=EveryCarry()), unknown)
    carry = num_bytes(select(by_carry.states, by_carry.known.output_avals.carry))
    by_residual = partial_eval(loop._replace(storage=EveryResidual()), unknown)
    rows = by_residual.known.output_avals.ys[by_residual.num_known_ys :]
    read = num_bytes(by_carry.known.input_avals.xs)
    evaluation = arithmetic(by_carry.known.body) + IN_CACHE * read
    return StepFacts(carry, num_bytes(rows), evaluation, num_bytes(by_residual.residual_avals))
