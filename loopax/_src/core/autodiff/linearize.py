"""Linearisation, which JAX asks for in reverse mode: results now, and later their tangents as a linear function.

The loop on pairs of primals and tangents is evaluated partially: tangents are unknown. Its known part runs now.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from loopax._src.core.autodiff.jvp import (
    jvp_loop,
    refuse_effects,
    split_pairs,
    tangents_of_results,
    tangents_or_zeros,
)
from loopax._src.core.autodiff.last_steps import Part, in_two, joined
from loopax._src.core.autodiff.partial_eval import partial_eval
from loopax._src.core.autodiff.partial_eval_rule import assemble, linear_inputs, run_known
from loopax._src.core.autodiff.planning import planned
from loopax._src.core.autodiff.transpose import linear_loop_p
from loopax._src.core.ir.loop import BoundLoop, Loop, LoopInputs, Outcome
from loopax._src.core.jaxpr.operand_groups import append_each, map_leaves, select_each
from loopax._src.core.jaxpr.util import select
from loopax._src.jax_internals import ad, zeros
from loopax._src.messages import no_reverse_mode_message

Linear = Callable[..., list[Any]]  # from the tangents of all operands to those of all results


def loop_linearize(
    nonzero: Sequence[bool], low: Any, high: Any, *operands: Any, **params: Any
) -> tuple[list[Any], list[bool], Linear]:
    """Run the known part of the loop on pairs now; its linear part is the function of tangents.

    Operands are `low, high, *consts, *carry, *xs`: xs have `bound` rows, consts and carry have none. `nonzero` says
    which have a tangent. Results are `num_steps, *carry, *ys, *saved, checkpoint_rows`. A result has a tangent if the
    loop on pairs has one for it after some number of steps.

    The known part computes the results and what the linear part needs (`partial_eval.py`). The linear part is linear in
    the tangents, which are all that is unknown of its operands, so JAX can transpose it.
    """
    loop = Loop(**params)
    refuse_effects(loop.body)
    inputs, is_nonzero = loop.inputs(operands), map_leaves(bool, loop.inputs(nonzero[2:]))
    pair, perturbed, outputs = jvp_loop(loop, is_nonzero)
    unknown = append_each(map_leaves(lambda _: False, inputs), select_each(perturbed, is_nonzero))
    starts = LoopInputs(*map(tangents_now, perturbed, inputs, is_nonzero))
    known, finish = _run_in_parts(pair, map_leaves(bool, unknown), low, high, append_each(inputs, starts))
    pairs = split_pairs(loop, outputs, known)
    depends = iter([tangent is None for tangent in (*pairs.carry, *pairs.ys, *pairs.saved)])
    results = pairs.results.leaves
    if any(x is None for x in results):
        raise ValueError(no_reverse_mode_message())
    mask = [flag and next(depends) for flag in loop.results_from(False, outputs, False).leaves]

    def linear(*tangents: Any) -> list[Any]:
        dots = LoopInputs(*map(tangents_or_zeros, perturbed, inputs, loop.inputs(tangents[2:])))
        pairs = split_pairs(loop, outputs, finish(append_each(inputs, dots)))
        found = tangents_of_results(loop, outputs, low, pairs)
        return only_marked(mask, results, found)

    return results, mask, linear


def tangents_now(perturbed: Sequence[bool], primals: Sequence[Any], nonzero: Sequence[bool]) -> list[Any]:
    """The tangents of the perturbed operands: types of those that come later, zeros where there is none at first."""
    avals = map(jax.typeof, select(perturbed, primals))
    pairs = zip(avals, select(perturbed, nonzero), strict=True)
    return [ad.UndefinedPrimal(aval) if comes_later else zeros(aval) for aval, comes_later in pairs]


def only_marked(mask: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The marked tangents. Others depend on no tangent of an operand, so they are zero."""
    triples = zip(mask, primals, tangents, strict=True)
    return [t if marked else ad.Zero(jax.typeof(x).to_tangent_aval()) for marked, x, t in triples]


def _run_in_parts(
    loop: Loop, unknown: LoopInputs, low: Any, high: Any, inputs: LoopInputs
) -> tuple[Outcome, Callable[[LoopInputs], Outcome]]:
    """The results, None for those that are unknown now, and a function from all inputs to all results."""
    bound = BoundLoop.of(loop, low, high, inputs)
    unknown = bound.masks(unknown)
    loop = planned(bound.loop, unknown)
    given, two = bound.inputs(inputs), in_two(loop)
    known, finish = _run_two(loop, *two, unknown, given) if two else _run_one(loop, unknown, low, high, given)
    carry = [None if ad.is_undefined_primal(x) else x for x in inputs.carry]
    return bound.outcome(known, carry), lambda inputs: bound.outcome(finish(bound.inputs(inputs)), inputs.carry)


def _run_one(
    loop: Loop, unknown: LoopInputs, low: Any, high: Any, inputs: LoopInputs
) -> tuple[Outcome, Callable[[LoopInputs], Outcome]]:
    """`_run_in_parts` of a loop that is bound as it is."""
    parts = partial_eval(loop, unknown)
    known, given = run_known(loop, parts, low, high, inputs)

    def finish(inputs: LoopInputs) -> Outcome:
        operands = given._replace(linear=linear_inputs(parts, inputs))
        linear = linear_loop_p.bind(*operands.leaves, **parts.linear._asdict())
        return assemble(loop, parts, known, linear)

    later = [None] * sum(loop.results_from(False, parts.unknown_outputs, False).leaves)
    return assemble(loop, parts, known, later), finish


def _run_two(
    loop: Loop, first: Part, last: Part, unknown: LoopInputs, inputs: LoopInputs
) -> tuple[Outcome, Callable[[LoopInputs], Outcome]]:
    """`_run_one` of a loop that is made of two: the second begins where the first ends."""
    start, finish_first = _run_one(first.loop, unknown, *first.window, first.inputs(inputs))
    avals = loop.output_avals.carry
    middle = [ad.UndefinedPrimal(aval) if x is None else x for x, aval in zip(start.carry, avals, strict=True)]
    unknown = unknown._replace(carry=tuple(x is None for x in start.carry))
    end, finish_last = _run_one(last.loop, unknown, *last.window, last.inputs(inputs._replace(carry=middle)))

    def finish(inputs: LoopInputs) -> Outcome:
        start = finish_first(first.inputs(inputs))
        return joined(loop, start, finish_last(last.inputs(inputs._replace(carry=start.carry))))

    return joined(loop, start, end), finish
