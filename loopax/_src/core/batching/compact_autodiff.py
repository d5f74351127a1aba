"""Derivatives of a batch of loops whose numbers of steps are not known at the start.

Forward mode is the batch of the loop on pairs. Reverse mode lets the known part run in stages, storing nothing. The
numbers of steps are known then, so the linear part is that of lanes in groups: each group walks forward once more,
storing what its kind says, and in the end back. Stages would have to store what they pass, each in its own way, and
compile as many forward and backward loops as there are stages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from loopax._src.core.autodiff.dce import loop_dce, stage_all
from loopax._src.core.autodiff.jvp import jvp_loop, jvp_of_results, nan_if_uncounted, perturbed_outputs, refuse_effects
from loopax._src.core.autodiff.partial_eval import known_loop, prune, unknown_outputs, window_walked
from loopax._src.core.autodiff.sweep import needs, with_inputs
from loopax._src.core.autodiff.transpose import type_of_linear
from loopax._src.core.batching.compact import (
    CompactVmap,
    compact_vmap,
    compact_vmap_of,
    compact_vmap_p,
    jvp_of_program,
    linearize_program,
)
from loopax._src.core.batching.stages import LOOPS, nothing_saved
from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, Outcome, part_of_inverse
from loopax._src.core.jaxpr.dependence import dependence, to_bits
from loopax._src.core.jaxpr.types import Axis
from loopax._src.core.jaxpr.util import (
    Mask,
    append_each,
    calls_custom_vjp,
    flatten,
    inner_jaxprs,
    map_leaves,
    merge_lists,
    reject,
    reject_each,
    select,
    select_each,
)
from loopax._src.jax_internals import (
    ClosedJaxpr,
    ad,
    evaluate_partially,
    happens,
    is_custom,
    is_known,
    is_nonzero,
    known_value,
    stage_unknown,
)


def _runs_in_stages(inner: CompactVmap) -> bool:
    return inner.rules is LOOPS and inner.static.predicated


def compact_vmap_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """The batch of the loop on pairs, where lanes run in stages; else the derivative of the program.

    Operands are `low, high, *consts, *carry, *xs`, with an axis of lanes where they are mapped; a tangent has its
    primal's. Lanes in stages stop at the same steps with and without tangents, since predicates are primals. So the
    derivative of the batch is the batch of derivatives, with the stages of the batch itself.
    """
    inner = CompactVmap(**params)
    if not _runs_in_stages(inner):
        return jvp_of_program(primals, tangents, **params)
    if calls_custom_vjp(inner.static.body):
        return _jvp_again(inner, primals, tangents)
    *windows, mapped = *inner.mapped[:2], inner.static.inputs(inner.mapped[2:])
    perturbed = map_leaves(is_nonzero, inner.static.inputs(tangents[2:]))

    def run(pair: Loop, low: Any, high: Any, *inputs: Sequence[Any]) -> Outcome:
        is_mapped = (*windows, *_mapped_pairs(pair, mapped, perturbed))
        return _bind(pair, inner.axis, is_mapped, [low, high, *flatten(inputs)])

    return jvp_of_results(inner.static, run, primals, tangents)


def _jvp_again(inner: CompactVmap, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The results in stages, and tangents of the same lanes in groups, where the body calls a `jax.custom_vjp`.

    JAX cannot map the tangents of such a function. So the lanes come first here, and the tangents then. JAX asks this
    where reverse mode is to follow, for there is no forward mode through a `jax.custom_vjp`.
    """
    refuse_effects(inner.static.body)
    nonzero = list(map(is_nonzero, tangents))
    out = _run_in_stages(inner, nonzero, primals)
    again = _Again.of(inner, nonzero, primals, out)
    windows = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in again.operands[:2]]
    _, found = jvp_of_program(again.operands, [*windows, *again.inputs(tangents)[2:]], **again.batch._asdict())
    return out.leaves, again.tangents(primals[0], out, found)


def _mapped_pairs(pair: Loop, mapped: LoopInputs, perturbed: LoopInputs) -> list[bool]:
    """Which operands on pairs have an axis of lanes: a tangent has its primal's, and every carry has one."""
    return flatten(append_each(mapped, select_each(perturbed, mapped))._replace(carry=(True,) * pair.num_carry))


def _bind(loop: Loop, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> Outcome:
    return loop.results(compact_vmap(LOOPS, loop, axis, mapped, operands))


class _BatchPartialEval(NamedTuple):
    """A loop in two parts: a known loop in stages, and a later one, of lanes with known numbers of steps."""

    known: Loop
    later: Loop
    unknown: LoopInputs  # which inputs `known` does not have
    outputs: LoopOutputs  # which outputs are those of `later`
    uses: LoopInputs  # which inputs `later` has

    @property
    def unknown_carry_of_later(self) -> Mask:
        """Which leaves of the carry of `later` are unknown; it evaluates the others again."""
        return tuple(select(self.uses.carry, self.unknown.carry))


def _partial_eval_loop(loop: Loop, unknown: LoopInputs) -> _BatchPartialEval:
    outputs = unknown_outputs(loop, unknown)
    unknown = unknown._replace(carry=outputs.carry)
    later, uses = _with_known_steps(loop, outputs)
    return _BatchPartialEval(known_loop(loop, unknown, outputs), later, unknown, outputs, uses)


def _with_known_steps(loop: Loop, outputs: LoopOutputs) -> tuple[Loop, LoopInputs]:
    """The loop without its predicate, for these outputs alone, and which inputs it uses."""
    body, uses = prune(loop, without_effects(loop.body), outputs)
    later = loop._replace(
        body=body,
        inverse=part_of_inverse(loop.inverse, flatten(uses), uses.carry),
        num_consts=sum(uses.consts),
        num_carry=sum(uses.carry),
        predicated=False,
        saving=None,
        saved=(),
        reporting=None,
    )
    return later, uses


def _steps_are_known(inner: CompactVmap, unknown: Sequence[bool]) -> bool:
    """Whether it is a batch of loops, and when each of them stops does not depend on what is unknown."""
    if inner.rules is not LOOPS or any(unknown[:2]):
        return False
    return not inner.static.predicated or not unknown_outputs(inner.static, inner.static.inputs(unknown[2:])).carry[0]


def compact_vmap_partial_eval(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
    """Run the known part in stages, which gives each lane's number of steps; the unknown part then runs in groups.

    Operands are `low, high, *consts, *carry, *xs`, with an axis of lanes where they are mapped; unknown ones are
    tangents. Results are those of the loop, with lanes. The later loop has no predicate: each lane takes exactly the
    steps that it took in the known part, so it computes the same. Its program gives the unknown results, and is itself
    evaluated partially. A batch without stages, and one whose numbers of steps are unknown, is its program.
    """
    inner = CompactVmap(**params)
    loop, unknown = inner.static, tuple(not is_known(t) for t in tracers)
    if not (_runs_in_stages(inner) and _steps_are_known(inner, unknown)):
        return _partial_eval_program(trace, inner, unknown, tracers)
    mapped, inputs = inner.mapped, loop.inputs(tracers[2:])
    parts = _partial_eval_loop(loop, map_leaves(bool, loop.inputs(unknown[2:])))
    low, high = map(known_value, tracers[:2])
    out = _run_known(loop, parts, inner.axis, mapped, low, high, map_leaves(known_value, inputs))
    # A leaf of the carry that becomes unknown on the way enters the later loop with its known start, hence the tracers.
    batch, operands = _in_groups(inner, parts.later, parts.uses, low, high, inputs, out.num_steps)
    results = evaluate_partially(trace, batch.program, operands, [True] * len(batch.program.out_avals))
    return _assemble(loop, parts, inner.axis, out, results).leaves


def _partial_eval_program(trace: Any, inner: CompactVmap, unknown: Sequence[bool], tracers: Sequence[Any]) -> list[Any]:
    """Evaluate the program partially if some of its results are known: the rule of a `jax.custom_jvp` returns these.

    Else the whole batch is staged.
    """
    given = to_bits(unknown)
    later = [bool(needed & given) for needed in dependence(inner.program)]
    if all(later):
        return stage_unknown(trace, compact_vmap_p, tracers, inner._asdict())
    return evaluate_partially(trace, inner.program, tracers, later)


def compact_vmap_linearize(nonzero: Sequence[bool], *operands: Any, **params: Any) -> tuple[list[Any], list[bool], Any]:
    """Run the lanes in stages now. The linear part is that of the same lanes in groups, with known numbers of steps.

    Operands are `low, high, *consts, *carry, *xs`, with an axis of lanes where they are mapped; `nonzero` says which
    have a tangent. A batch that does not run in stages is linearised as its program.
    """
    inner = CompactVmap(**params)
    if not _runs_in_stages(inner):
        return linearize_program(nonzero, *operands, **params)
    refuse_effects(inner.static.body)
    out = _run_in_stages(inner, nonzero, operands)
    again = _Again.of(inner, nonzero, operands, out)
    _, mask, linear = linearize_program(again.inputs(nonzero), *again.operands, **again.batch._asdict())

    def tangents_later(*tangents: Any) -> list[Any]:
        return again.tangents(operands[0], out, linear(*again.inputs(tangents)))

    return out.leaves, again.results(mask, [False] * len(out.leaves)).leaves, tangents_later


def _run_in_stages(inner: CompactVmap, nonzero: Sequence[bool], operands: Sequence[Any]) -> Outcome:
    """The results of the lanes, with the effects that they have in a derivative for tangents of these operands.

    They are those of the rules of functions with derivatives of their own; what runs in groups has none.
    """
    loop = inner.static
    if not _acts_in_custom(loop.body):
        return loop.results(compact_vmap_p.bind(*operands, **inner._asdict()))
    inputs = loop.inputs(operands[2:])
    pair, perturbed, _ = jvp_loop(loop, map_leaves(bool, loop.inputs(nonzero[2:])))
    unknown = append_each(map_leaves(lambda _: False, inputs), select_each(perturbed, perturbed))
    known = known_loop(pair, unknown, unknown_outputs(pair, unknown))
    return _bind(known, inner.axis, inner.mapped, operands)


def _acts_in_custom(program: ClosedJaxpr) -> bool:
    """Whether a function with derivatives of its own has effects."""
    acting = [eqn for eqn in program.eqns if happens(eqn.effects)]
    return any(is_custom(eqn) or any(map(_acts_in_custom, inner_jaxprs(eqn))) for eqn in acting)


class _Again(NamedTuple):
    """The lanes of a batch in stages once more, in groups: each takes the steps that it has taken."""

    loop: Loop  # in stages
    outputs: LoopOutputs  # which of its outputs have a tangent; the loop in groups computes no others
    uses: LoopInputs  # which of its inputs the loop in groups has
    batch: CompactVmap  # the batch of the loop in groups, and its operands
    operands: list[Any]

    @classmethod
    def of(cls, inner: CompactVmap, nonzero: Sequence[bool], operands: Sequence[Any], out: Outcome) -> "_Again":
        """The batch for tangents of these operands; `out` are the results of that in stages."""
        loop, (low, high, *leaves) = inner.static, operands
        outputs = perturbed_outputs(loop, map_leaves(bool, loop.inputs(nonzero[2:])))
        later, uses = _with_known_steps(loop, outputs)
        batch, values = _in_groups(inner, later, uses, low, high, loop.inputs(leaves), out.num_steps)
        return cls(loop, outputs, uses, batch, values)

    def inputs(self, values: Sequence[Any]) -> list[Any]:
        """What there is for each operand, from what there is for each operand of the batch in stages."""
        return [*values[:2], *flatten(select_each(self.uses, self.loop.inputs(values[2:])))]

    def results(self, found: Sequence[Any], others: Sequence[Any]) -> Outcome:
        """What there is for each result in stages: what is `found` for those in groups, else that of `others`."""
        later, stages = self.batch.static.results(found), self.loop.results(others)
        carry = select(select(self.uses.carry, self.outputs.carry), later.carry)
        return stages._replace(
            carry=merge_lists(self.outputs.carry, reject(self.outputs.carry, stages.carry), carry),
            ys=merge_lists(self.outputs.ys, reject(self.outputs.ys, stages.ys), later.ys),
        )

    def tangents(self, low: Any, out: Outcome, found: Sequence[Any]) -> list[Any]:
        """The tangents of the results in stages, from those in groups."""
        zero = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out.leaves]
        tangents = self.results(found, zero)
        carry = [nan_if_uncounted(self.loop, low + out.num_steps, dot) for dot in tangents.carry]
        return tangents._replace(carry=carry).leaves


def _run_known(
    loop: Loop, parts: _BatchPartialEval, axis: Axis, mapped: Mask, low: Any, high: Any, inputs: LoopInputs
) -> Outcome:
    """Run the known part of a batch in stages."""
    windows, is_mapped = mapped[:2], loop.inputs(mapped[2:])
    known, known_mapped = (flatten(reject_each(parts.unknown, groups)) for groups in (inputs, is_mapped))
    return _bind(parts.known, axis, (*windows, *known_mapped), [low, high, *known])


def _in_groups(
    inner: CompactVmap, later: Loop, uses: LoopInputs, low: Any, high: Any, inputs: LoopInputs, num_steps: Any
) -> tuple[CompactVmap, list[Any]]:
    """The batch of the later loop, whose lanes take these numbers of steps, and its operands."""
    (mapped_low, mapped_high), is_mapped = inner.mapped[:2], inner.static.inputs(inner.mapped[2:])
    mapped_windows = (True, mapped_high) if later.reverse else (mapped_low, True)
    used, used_mapped = (flatten(select_each(uses, groups)) for groups in (inputs, is_mapped))
    operands = [*window_walked(inner.static, low, high, num_steps), *used]
    avals = list(map(type_of_linear, operands))
    return compact_vmap_of(LOOPS, later, inner.axis, (*mapped_windows, *used_mapped), avals), operands


def _assemble(loop: Loop, parts: _BatchPartialEval, axis: Axis, out: Outcome, results: Sequence[Any]) -> Outcome:
    """The results of the batch from those of its known part, and of the later loop's program."""
    later = parts.later.results(results)
    carry = merge_lists(parts.outputs.carry, out.carry, select(parts.unknown_carry_of_later, later.carry))
    ys = merge_lists(parts.outputs.ys, out.ys, later.ys)
    return loop.results([out.num_steps, *carry, *ys, *nothing_saved(loop, axis)])


def compact_vmap_partial_eval_custom(_: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any) -> Any:
    """Run the known part of a batch in `jax.checkpoint` now, and stage the whole batch for later.

    `unknown` and `instantiated` have a flag for each operand: `low, high, *consts, *carry, *xs`. The answer has the
    parts of that of `loop_partial_eval_custom`, for the same reason. JAX also asks where every operand is known.
    """
    inner = CompactVmap(**eqn.params)
    if not any(unknown):
        return stage_all(eqn, instantiated, eqn, [False] * len(eqn.outvars))
    if not _steps_are_known(inner, unknown):
        return stage_all(eqn, instantiated)
    loop = inner.static
    parts = _partial_eval_loop(loop, map_leaves(bool, loop.inputs(unknown[2:])))
    unknown_in = [False, False, *flatten(parts.unknown)]
    unknown_out = loop.results_from(False, parts.outputs, False).leaves
    invars, mapped = reject(unknown_in, eqn.invars), tuple(reject(unknown_in, inner.mapped))
    known = compact_vmap_of(LOOPS, parts.known, inner.axis, mapped, [v.aval for v in invars])
    part = eqn.replace(
        invars=invars,
        outvars=reject(unknown_out, eqn.outvars),
        params=known._asdict(),
        effects=known.program.effects,
    )
    return stage_all(eqn, instantiated, part, unknown_out)


def compact_vmap_dce(used: list[bool], *rest: Any) -> Any:
    """Remove from a batch what its used results do not need: the batch of what is left of its loop or sweep.

    `used` has a flag for each result. The answer has the parts of that of `loop_dce`.
    """
    eqn = rest[-1]
    inner = CompactVmap(**eqn.params)
    if not any(used) and not happens(eqn.effects):
        return [False] * len(eqn.invars), None
    if isinstance(inner.static, Loop):
        used_in, slim = loop_dce(used, eqn.replace(params=inner.static._asdict()))
        static, outvars = Loop(**slim.params), slim.outvars
    else:
        carry, ys = inner.static.outputs(used)
        keep = needs(inner.static, carry, ys)
        static, used_in = with_inputs(inner.static, keep, ys), [True, True, *flatten(keep)]
        outvars = select([*keep.carry, *ys], eqn.outvars)
    invars, mapped = select(used_in, eqn.invars), tuple(select(used_in, inner.mapped))
    batch = compact_vmap_of(inner.rules, static, inner.axis, mapped, [v.aval for v in invars])
    return used_in, eqn.replace(invars=invars, outvars=outvars, params=batch._asdict(), effects=batch.program.effects)
