"""Derivatives of a batch of loops whose numbers of steps are not known at the start.

Forward mode is the batch of the loop on pairs. Reverse mode lets the known part run in stages, storing nothing. The
numbers of steps are known then, so the linear part is that of lanes in groups: each group walks forward once more,
storing what its kind says, and in the end back. If stages stored for the gradient, each stage would need a store of
its own, a forward loop and a backward loop.
"""

from collections.abc import Sequence
from typing import Any

from loopax._src import jax_internals as jaxi
from loopax._src.core.autodiff import jvp
from loopax._src.core.autodiff.dce import leave_whole, loop_dce
from loopax._src.core.autodiff.partial_eval import known_loop, limits_walked, prune, unknown_outputs
from loopax._src.core.autodiff.sweep import needs, with_inputs
from loopax._src.core.autodiff.transpose import type_of_linear
from loopax._src.core.batching.compact_primitive import (
    CompactVmap,
    compact_vmap,
    compact_vmap_of,
    compact_vmap_p,
    evaluate_batch,
    program_with_derivatives,
)
from loopax._src.core.batching.compact_stages import LOOPS, nothing_saved
from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.ir.lane_choice import OneStage
from loopax._src.core.ir.lanes import Compact
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, Outcome, part_of_inverse
from loopax._src.core.jaxpr.dependence import dependence, to_bits
from loopax._src.core.jaxpr.evaluate import jvp_expanded
from loopax._src.core.jaxpr.util import (
    append_each,
    calls_custom_vjp,
    flatten,
    invert,
    map_leaves,
    merge_lists,
    reject,
    reject_each,
    select,
    select_each,
    split_list,
    trace,
)
from loopax._src.jax_internals import ClosedJaxpr, equations_in, jaxpr_as_fun


def _runs_in_stages(inner: CompactVmap) -> bool:
    return inner.rules is LOOPS and (inner.static.predicated or isinstance(inner.static.lanes, OneStage))


def compact_vmap_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """The batch of the loop on pairs, where lanes run in stages; else the derivative of the program.

    Operands are `low, high, *consts, *carry, *xs`, with an axis of lanes where they are mapped; a tangent has its
    primal's. Lanes in stages stop at the same steps with and without tangents, since predicates are primals. So the
    derivative of the batch is the batch of derivatives, with the stages of the batch itself.
    """
    inner = CompactVmap(**params)
    loop, nonzero = inner.static, list(map(jaxi.is_nonzero, tangents))
    if not _runs_in_stages(inner):
        return jvp_expanded(evaluate_batch)(primals, tangents, **params)
    if calls_custom_vjp(loop.body):
        # JAX cannot map the tangents of a `jax.custom_vjp`, so lanes come first here, and tangents then. JAX asks this
        # where reverse mode is to follow, for there is no forward mode through such a function.
        results, _, tangents_of = compact_vmap_linearize(nonzero, *primals, **params)
        return results, tangents_of(*tangents)
    mapped, perturbed = loop.inputs(inner.mapped[2:]), map_leaves(bool, loop.inputs(nonzero[2:]))
    # Before: [*consts, *carry, *xs] -> After: [*consts, *their tangents, *carry, *its tangents, *xs, *their tangents]
    # A tangent has lanes where its primal has them, and every leaf of a carry has them.
    mapped_pairs = append_each(mapped, select_each(perturbed, mapped))

    def run(pair: Loop, low: Any, high: Any, *inputs: Sequence[Any]) -> Outcome:
        flags = (*inner.mapped[:2], *flatten(mapped_pairs._replace(carry=(True,) * pair.num_carry)))
        return pair.results(compact_vmap(LOOPS, pair, inner.axis, flags, [low, high, *flatten(inputs)]))

    return jvp.jvp_of_results(loop, run, primals, tangents)


def _known_part(inner: CompactVmap, unknown: Sequence[bool]) -> tuple[Loop, LoopInputs, LoopOutputs] | None:
    """The known part of a batch of loops, and what is unknown of its inputs, at the fixed point, and of its outputs.

    None for sweeps, and where it depends on what is unknown when lanes stop.
    """
    if inner.rules is not LOOPS or any(unknown[:2]):
        return None
    loop, inputs = inner.static, map_leaves(bool, inner.static.inputs(unknown[2:]))
    outputs = unknown_outputs(loop, inputs)
    if loop.predicated and outputs.carry[0]:
        return None
    inputs = inputs._replace(carry=outputs.carry)
    return known_loop(loop, inputs, outputs), inputs, outputs


def compact_vmap_partial_eval(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
    """Run the known part in stages, which gives each lane's number of steps; the unknown part then runs in groups.

    Operands are `low, high, *consts, *carry, *xs`, with an axis of lanes where they are mapped; unknown ones are
    tangents. Results are those of the loop, with lanes. A batch without stages, and one whose numbers of steps are
    unknown, is its program.
    """
    inner = CompactVmap(**params)
    loop, flags = inner.static, [not jaxi.is_known(t) for t in tracers]
    part = _known_part(inner, flags) if _runs_in_stages(inner) else None
    if part is None:
        # The rule of a `jax.custom_jvp` may return known results. Where there are none, the whole batch is left.
        given = to_bits(flags)
        later = [bool(needed & given) for needed in dependence(inner.program)]
        if all(later):
            return jaxi.leave_for_later(trace, compact_vmap_p, tracers, inner._asdict())
        return jaxi.evaluate_partially(trace, program_with_derivatives(inner), tracers, later)
    known, unknown, outputs = part
    # Before: [low, high, *consts, *carry, *xs] -> After: [low, high, *known consts, *known carry, *known xs]
    low, high = map(jaxi.known_value, tracers[:2])
    values = reject_each(unknown, map_leaves(jaxi.known_value, loop.inputs(tracers[2:])))
    mapped = (*inner.mapped[:2], *flatten(reject_each(unknown, loop.inputs(inner.mapped[2:]))))
    out = known.results(compact_vmap(LOOPS, known, inner.axis, mapped, [low, high, *flatten(values)]))
    # A leaf of the carry that becomes unknown on the way enters the later loop with its known start, hence the tracers.
    program, operands, places = _again_in_groups(inner, outputs, [low, high, *tracers[2:]], out.num_steps)
    later = jaxi.evaluate_partially(trace, program, operands, [True] * len(program.out_avals))
    joined = merge_lists(flatten(outputs), [*out.carry, *out.ys], [later[place] for place in places])
    return [out.num_steps, *joined, *nothing_saved(loop, inner.axis)]


def _again_in_groups(
    inner: CompactVmap, outputs: LoopOutputs, operands: Sequence[Any], num_steps: Any
) -> tuple[ClosedJaxpr, list[Any], list[int]]:
    """A program that computes these outputs of a batch in stages, its operands, and where outputs are in its results.

    It has the operands of the batch, but for low and high: the limits of a lane are those of the rows that it has
    walked. So the program needs no predicate, each lane takes exactly the steps that it has taken, and lanes are in
    groups.
    """
    loop, (low, high, *leaves) = inner.static, operands
    body, uses = prune(loop, without_effects(loop.body), outputs)
    later = loop._replace(
        body=body,
        inverse=part_of_inverse(loop.inverse, flatten(uses), uses.carry),
        num_consts=sum(uses.consts),
        num_carry=sum(uses.carry),
        predicated=False,
        stop=None,
        saving=None,
        saved=(),
        lanes=Compact() if isinstance(loop.lanes, OneStage) else loop.lanes,
        reporting=None,
    )
    limits_mapped = inner.mapped[:2]
    if loop.predicated:  # the end of the rows that a lane has walked, in the direction of the walk, is its own
        limits_mapped = (True, limits_mapped[1]) if loop.reverse else (limits_mapped[0], True)
    values = [*limits_walked(loop, low, high, num_steps), *leaves]
    used, avals = [True, True, *flatten(uses)], list(map(type_of_linear, values))
    mapped = tuple(select(used, (*limits_mapped, *inner.mapped[2:])))
    batch = compact_vmap_of(LOOPS, later, inner.axis, mapped, select(used, avals))
    program = trace(lambda *values: jaxpr_as_fun(batch.program)(*select(used, values)), avals)
    places = later.results(range(len(program.out_avals)))
    # Other leaves of its carry are evaluated again for these alone.
    return program, values, [*select(select(uses.carry, outputs.carry), places.carry), *places.ys]


def compact_vmap_linearize(nonzero: Sequence[bool], *operands: Any, **params: Any) -> tuple[list[Any], list[bool], Any]:
    """Run the lanes in stages now. The linear part is that of the same lanes in groups, with known numbers of steps.

    Operands are `low, high, *consts, *carry, *xs`, with an axis of lanes where they are mapped; `nonzero` says which
    have a tangent. A batch that does not run in stages is linearised as its program.
    """
    inner = CompactVmap(**params)
    if not _runs_in_stages(inner):
        return jaxi.linearized(jvp_expanded(evaluate_batch), nonzero, *operands, **params)
    loop, perturbed = inner.static, map_leaves(bool, inner.static.inputs(nonzero[2:]))
    jvp.refuse_effects(loop.body)
    if any(map(jaxi.is_custom, equations_in(loop.body))):
        # Functions with derivatives of their own are what their rules compute, and have the effects of these. What
        # runs in groups has no effects, so the stages are those of the known part of the loop on pairs.
        pair, of_pair, _ = jvp.jvp_loop(loop, perturbed)
        unknown = append_each(map_leaves(lambda _: False, of_pair), select_each(of_pair, of_pair))
        known = known_loop(pair, unknown, unknown_outputs(pair, unknown))
        out = known.results(compact_vmap(LOOPS, known, inner.axis, inner.mapped, operands))
    else:
        out = loop.results(compact_vmap_p.bind(*operands, **params))
    outputs = jvp.perturbed_outputs(loop, perturbed)
    program, values, places = _again_in_groups(inner, outputs, operands, out.num_steps)
    _, depends, linear = jaxi.linearized(jvp_expanded(jaxpr_as_fun(program)), nonzero, *values)
    mask = [False, *flatten(outputs), *(False for _ in (*out.saved, *out.checkpoint_rows))]
    flags = iter([depends[place] for place in places])

    def tangents_of(*tangents: Any) -> list[Any]:
        dots = linear(*tangents)
        carry, ys = split_list([dots[place] for place in places], [sum(outputs.carry)])
        carry = [jvp.nan_if_uncounted(loop, operands[0] + out.num_steps, dot) for dot in carry]
        return jvp.fill_tangents(mask, out.leaves, [*carry, *ys])

    return out.leaves, [has_one and next(flags) for has_one in mask], tangents_of


def compact_vmap_partial_eval_custom(_: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any) -> Any:
    """Run the known part of a batch in `jax.checkpoint` now, and leave the whole batch for later.

    `unknown` and `instantiated` have a flag for each operand: `low, high, *consts, *carry, *xs`. The answer has the
    parts of that of `loop_partial_eval_custom`, for the same reason. JAX also asks where every operand is known.
    """
    inner = CompactVmap(**eqn.params)
    if not any(unknown):
        return leave_whole(eqn, instantiated, eqn, [False] * len(eqn.outvars))
    if (part := _known_part(inner, unknown)) is None:
        return leave_whole(eqn, instantiated)
    known, inputs, outputs = part
    unknown_out = inner.static.results_from(False, outputs, False).leaves
    now = _of_operands(inner, known, eqn, [True, True, *invert(flatten(inputs))])
    return leave_whole(eqn, instantiated, now.replace(outvars=reject(unknown_out, eqn.outvars)), unknown_out)


def compact_vmap_dce(used: list[bool], *rest: Any) -> Any:
    """Remove from a batch what its used results do not need: the batch of what is left of its loop or sweep.

    `used` has a flag for each result. The answer has the parts of that of `loop_dce`.
    """
    eqn = rest[-1]
    inner = CompactVmap(**eqn.params)
    if not any(used) and not jaxi.happens(eqn.effects):
        return [False] * len(eqn.invars), None
    if isinstance(inner.static, Loop):
        used_in, slim = loop_dce(used, eqn.replace(params=inner.static._asdict()))
        static, outvars = Loop(**slim.params), slim.outvars
    else:
        carry, ys = inner.static.outputs(used)
        keep = needs(inner.static, carry, ys)
        static, used_in = with_inputs(inner.static, keep, ys), [True, True, *flatten(keep)]
        outvars = select([*keep.carry, *ys], eqn.outvars)
    return used_in, _of_operands(inner, static, eqn, used_in).replace(outvars=outvars)


def _of_operands(inner: CompactVmap, static: Any, eqn: Any, kept: Sequence[bool]) -> Any:
    """The equation of the batch of another loop or sweep, which takes these of its operands."""
    invars, mapped = zip(*select(kept, zip(eqn.invars, inner.mapped, strict=True)), strict=True)
    batch = compact_vmap_of(inner.rules, static, inner.axis, mapped, [v.aval for v in invars])
    return eqn.replace(invars=list(invars), params=batch._asdict(), effects=batch.program.effects)
