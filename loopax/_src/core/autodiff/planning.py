"""Asking a loop's kind for its plan, where a gradient is taken: here it is known what the derivative needs."""

from functools import partial
from sys import maxsize

from loopax._src.core.autodiff.partial_eval import PartialEval, partial_eval
from loopax._src.core.autodiff.transpose import transposed_step
from loopax._src.core.ir.facts import LoopFacts, StepFacts
from loopax._src.core.ir.kind import Asked
from loopax._src.core.ir.loop import Loop, LoopInputs
from loopax._src.core.ir.plan import EveryCarry, EveryResidual, Plan
from loopax._src.core.jaxpr import tiny
from loopax._src.core.jaxpr.cost import arithmetic, evaluation
from loopax._src.core.jaxpr.costs import costs
from loopax._src.core.jaxpr.operand_groups import flatten
from loopax._src.core.jaxpr.properties import linear_results
from loopax._src.core.jaxpr.util import num_bytes, select, weakly_cached
from loopax._src.jax_internals import dce


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
    rows = by_residual.stored
    read = num_bytes(by_carry.known.input_avals.xs)
    again = evaluation(by_carry.known.body) + costs().cached_byte * read
    facts = StepFacts(carry, num_bytes(rows), again, num_bytes(by_residual.residual_avals))
    calls_of_rows = costs().call * len(rows)
    if not tiny.is_tiny(by_carry.known.body):
        return facts._replace(step=costs().step, residual_calls=calls_of_rows)
    ahead = tiny.calls(by_residual.known.body, tiny.MOST_STORING, num_bytes(rows))
    back = _calls_of_derivative(by_residual, tiny.MOST_FROM_RESIDUALS)
    return facts._replace(
        evaluation=arithmetic(by_carry.known.body),
        step=tiny.STEP,
        carry_calls=_calls_of_derivative(by_carry, tiny.MOST_FROM_CARRIES),
        residual_calls=ahead + back + (2 * calls_of_rows if ahead or back else tiny.ROW * len(rows)),
    )


def _calls_of_derivative(parts: PartialEval, most: int) -> float:
    """Those of a step that only the last carry's cotangent asks for; none where the step has no transpose.

    JAX does not only ask for derivatives: where it looks for what is the same at every step of a `lax.scan`, values are
    unknown, and not tangents, so that what depends on them need not be linear.
    """
    linear, wanted = parts.linear, [*parts.linear.linear_carry, *(False for _ in parts.linear.output_avals.ys)]
    needed = dce(linear.body, wanted, True)[0]
    if linear_results(needed.jaxpr, [False, *flatten(linear.masks)]) is None:
        return 0.0
    step = transposed_step(linear, (False,) * len(linear.output_avals.ys))
    return tiny.calls(step, most)
