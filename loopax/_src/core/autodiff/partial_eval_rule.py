"""Partial evaluation of a loop under JAX's transformations: run the known part, and leave the linear part for later.

JAX asks where a loop stands in a body that is evaluated partially; for the derivative of the loop itself it asks
`linearize.py`.
"""

from collections.abc import Sequence
from typing import Any

from loopax._src.core.autodiff.partial_eval import PartialEval, partial_eval
from loopax._src.core.autodiff.planning import planned
from loopax._src.core.autodiff.transpose import transpose_linear_loop, type_of_linear
from loopax._src.core.ir.linear_loop import LinearOperands, linear_loop_p
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, Outcome, loop_p, run
from loopax._src.core.ir.strip_progress import strip_progress_of_params
from loopax._src.core.jaxpr.operand_groups import fill_each, flatten, map_leaves, reject_each, select_each
from loopax._src.core.jaxpr.util import merge_lists, reject, select
from loopax._src.core.jaxpr.varying_axes import retyped
from loopax._src.core.masking.substitute import filled_in_derivatives
from loopax._src.jax_internals import (
    ClosedJaxpr,
    ad,
    happens,
    is_known,
    jaxpr_as_fun,
    known_value,
    stage_unknown,
    varying_axes,
)


def run_known(
    loop: Loop, parts: PartialEval, low: Any, high: Any, inputs: LoopInputs
) -> tuple[Outcome, LinearOperands]:
    """Run the known part; returns the results that are known, and the operands of the linear part.

    inputs: of the loop; those that are unknown go into the linear part as they are. A leaf of the carry that becomes
    unknown on the way goes in with its known start.
    """
    known = reject_each(parts.unknown, inputs)
    out = run(parts.known, low, high, *known)
    ys, residual_rows = out.ys[: parts.num_known_ys], out.ys[parts.num_known_ys :]
    used = reject_each(parts.unknown, parts.uses)
    saved = dict(zip(select(parts.known.saved_mask, range(len(known.carry))), out.saved, strict=True))
    states = [] if all(parts.linear.linear_carry) else select(parts.states, range(len(known.carry)))
    is_saved = bool(states) and parts.linear.saving is not None
    consts = _hoisted(parts.hoisted, known.consts, out) if parts.hoisted else select(used.consts, known.consts)
    last = select(reject(parts.unknown.carry, parts.last), out.carry)
    operands = LinearOperands(
        *window_walked(loop, low, high, out.num_steps),
        LoopInputs([*consts, *last], [known.carry[i] for i in states], [*select(used.xs, known.xs), *residual_rows]),
        saved=[saved[i] for i in states if is_saved],
        checkpoint_rows=out.checkpoint_rows if is_saved else [],
        linear=linear_inputs(parts, inputs),
    )
    wanted = [i for i, keep in enumerate(reject(parts.unknown.carry, loop.saved_mask)) if keep]
    rows = out.checkpoint_rows if loop.saving else []
    return Outcome(out.num_steps, out.carry, ys, [saved[i] for i in wanted], rows), operands


def linear_inputs(parts: PartialEval, inputs: LoopInputs) -> LoopInputs:
    """The inputs of the loop that the linear part takes as linear ones: of the carry, all that are unknown."""
    uses = parts.uses._replace(carry=(True,) * len(parts.uses.carry))
    return select_each(select_each(parts.unknown, uses), select_each(parts.unknown, inputs))


def _hoisted(residuals: ClosedJaxpr, consts: Sequence[Any], out: Outcome) -> list[Any]:
    """Residuals that are the same at every step. Their types in the body may not say that they vary where they do."""
    axes = varying_axes(out.num_steps)
    return [retyped(x, varying_axes(x) | axes) for x in jaxpr_as_fun(residuals)(*consts)]


def window_walked(loop: Loop, low: Any, high: Any, num_steps: Any) -> tuple[Any, Any]:
    """The rows that the loop walked."""
    if not loop.predicated:
        return low, high
    return (high - num_steps, high) if loop.reverse else (low, low + num_steps)


def assemble(loop: Loop, parts: PartialEval, known: Outcome, linear: Sequence[Any]) -> Outcome:
    """The loop's results from those of its two parts."""
    unknown = loop.results_from(False, parts.unknown_outputs, False).leaves
    return loop.results(merge_lists(unknown, known.leaves, linear))


def loop_partial_eval(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
    """Run the known part of a loop now. Stage its linear part, which gets what it needs of the known part as operands.

    Operands are `low, high, *consts, *carry, *xs`: xs have `bound` rows, consts and carry have none. Results are those
    of the loop. JAX asks where it evaluates a program on primals and tangents partially (the body of a loop, the rule
    of a `jax.custom_jvp`): primals are known then, tangents are not.

    A leaf of the carry is unknown if, after some number of steps, it depends on an unknown operand (`unknown_outputs`).
    No known leaf then reads an unknown one, so the known leaves make a loop of their own. The linear part reads the
    known carry of each step: from checkpoints, as rows, or as residuals, as `loop.storage` says. The whole loop is
    staged if its number of steps is unknown, if all its results are unknown and nothing happens on the way (a loop that
    returns its carry unchanged may print), or if no operand is.
    """
    loop = Loop(**params)
    low, high, *unknown = (not is_known(t) for t in tracers)
    if low or high or not any(unknown):
        return stage_unknown(trace, loop_p, tracers, loop._asdict())
    masks = map_leaves(bool, loop.inputs(unknown))
    loop = planned(loop, masks, partial_eval)
    parts = partial_eval(loop, masks)
    nothing_known = all(flatten(parts.unknown_outputs)) and not happens(parts.known.body.effects)
    if nothing_known or (loop.predicated and parts.unknown.carry[0]):
        return stage_unknown(trace, loop_p, tracers, loop._asdict())
    low, high, *operands = map(known_value, tracers)
    known, linear = run_known(loop, parts, low, high, loop.inputs(operands))
    linear = linear._replace(linear=linear_inputs(parts, loop.inputs(tracers[2:])))
    out = stage_unknown(trace, linear_loop_p, linear.leaves, parts.linear._asdict())
    return assemble(loop, parts, known, out).leaves


def loop_transpose(cts: Sequence[Any], low: Any, high: Any, *operands: Any, **params: Any) -> list[Any]:
    """Transpose a loop that is linear in some operands, where JAX does not linearise first (`jax.linear_transpose`).

    Operands are `low, high, *consts, *carry, *xs`; undefined primals are linear, the others are values. `cts` are the
    cotangents of `num_steps, *carry, *ys, *saved, checkpoint_rows`. Partial evaluation, with the linear operands as the
    unknown ones, splits the loop into a known and a linear part. The known part runs, and the transpose of the linear
    part is the answer. `low`, `high` and all operands that have values get None.
    """
    loop = Loop(**strip_progress_of_params(params))
    loop = loop._replace(body=filled_in_derivatives(loop.body))
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [None] * (2 + len(operands))
    inputs = loop.inputs(operands)
    unknown = map_leaves(ad.is_undefined_primal, inputs)
    loop = planned(loop, unknown, partial_eval)
    parts = partial_eval(loop, unknown)
    _, given = run_known(loop, parts, low, high, inputs)
    ct = loop.results(cts)
    linear_cts = select_each(parts.unknown_outputs, LoopOutputs(ct.carry, ct.ys))
    avals = map_leaves(type_of_linear, given.linear)
    found = transpose_linear_loop(linear_cts, parts.linear, given, avals)
    return [None, None, *flatten(_cotangents_of_inputs(parts, unknown, found))]


def _cotangents_of_inputs(parts: PartialEval, unknown: LoopInputs, cts: LoopInputs) -> LoopInputs:
    """Cotangents of the linear part's inputs as cotangents of the loop's; None for those that get none."""
    uses = parts.uses._replace(carry=(True,) * len(parts.uses.carry))
    used = map_leaves(lambda is_unknown, is_used: is_unknown and is_used, parts.unknown, uses)
    return map_leaves(lambda ct, is_unknown: ct if is_unknown else None, fill_each(used, None, cts), unknown)
