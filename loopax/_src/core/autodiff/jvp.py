"""Forward mode: the same loop on pairs of primals and tangents, for what has a tangent at all."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, Outcome, run
from loopax._src.core.jaxpr.dataflow import dependence_fixpoint
from loopax._src.core.jaxpr.groups import append_each, flatten, map_leaves, merge_each
from loopax._src.core.jaxpr.nan import nan_if
from loopax._src.core.jaxpr.util import MOST_STEPS, Mask, merge_lists, reject, select, split_list, trace, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, ad, is_nonzero, jaxpr_as_fun, undifferentiable_effects, zeros
from loopax._src.messages import effects_message


def tangents_or_zeros(mask: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The tangents of the marked operands, symbolic zeros written out."""
    pairs = zip(select(mask, primals), select(mask, tangents), strict=True)
    return [t if is_nonzero(t) else zeros(jax.typeof(p)) for p, t in pairs]


def fill_tangents(mask: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """One tangent per primal: the given ones where marked, symbolic zeros elsewhere."""
    given = iter(tangents)
    return [next(given) if m else ad.Zero(jax.typeof(p).to_tangent_aval()) for m, p in zip(mask, primals, strict=True)]


def nonzero_mask(tangents: Sequence[Any]) -> Mask:
    """Which operands are perturbed."""
    return tuple(map(is_nonzero, tangents))


def inexact(avals: Sequence[Any]) -> Mask:
    """Which types have tangents: floating-point and complex ones."""
    return tuple(bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in avals)


def jvp_body(
    body: ClosedJaxpr,
    sizes: Sequence[int],
    perturbed: Sequence[Sequence[bool]],
    num_outputs: Sequence[int],
    wanted: Sequence[Sequence[bool]],
) -> ClosedJaxpr:
    """The body on primals and tangents: groups of inputs `g1, ġ1, g2, ġ2, ...`, the same for outputs.

    `sizes` are the lengths of the groups of inputs (behind the row), `perturbed` says which members
    have a tangent; `num_outputs` and `wanted` say the same of the outputs.
    """
    function = jaxpr_as_fun(body)
    mask = [False, *(flag for group in perturbed for flag in group)]

    def both(row: Any, *operands: Any) -> list[Any]:
        cuts = [size for n, group in zip(sizes, perturbed, strict=True) for size in (n, sum(group))]
        *groups, _ = split_list(operands, cuts)
        primals = [row, *(p for group in groups[::2] for p in group)]
        tangents = [t for group in groups[1::2] for t in group]

        def of_perturbed(*values: Any) -> list[Any]:
            return function(*merge_lists(mask, reject(mask, primals), values))

        out, dot = jax.jvp(of_perturbed, tuple(select(mask, primals)), tuple(tangents))
        *out_groups, _ = split_list(out, num_outputs)
        *dot_groups, _ = split_list(dot, num_outputs)
        pairs = zip(out_groups, dot_groups, wanted, strict=True)
        return [value for p, t, keep in pairs for value in (*p, *select(keep, t))]

    (row,), *groups, _ = split_list(body.in_avals, [1, *sizes])
    avals = [a for group, flags in zip(groups, perturbed, strict=True) for a in (*group, *select(flags, group))]
    return trace(both, [row, *avals])


def tangent_inputs(groups: Sequence[Sequence[bool]]) -> Mask:
    """Among the inputs of a body on pairs, which are tangents, if the given groups have these."""
    return (False, *(flag for group in groups for flag in ((False,) * len(group) + (True,) * sum(group))))


@weakly_cached
def jvp_loop(loop: Loop, perturbed: LoopInputs) -> tuple[Loop, LoopInputs, LoopOutputs]:
    """The loop on pairs, and which of its inputs (at the fixed point) and outputs are perturbed.

    Find which carry leaves and ys are perturbed, as a least fixed point. Dependence analysis gives an upper bound;
    tracing the JVP tightens it, since a dependence may have an identically zero derivative.
    """
    allowed = inexact(loop.body.out_avals)
    flags = dependence_fixpoint(loop.body, (False, *flatten(perturbed)), loop.carry_range, allowed)
    bound = LoopOutputs(*map(tuple, loop.outputs(flags)))
    inputs = perturbed._replace(carry=bound.carry)
    pair = _jvp_loop(loop, inputs, bound)
    exact = _exact_outputs(loop, pair, perturbed.carry, inputs, bound)
    if exact != bound:
        inputs = perturbed._replace(carry=exact.carry)
        pair = _jvp_loop(loop, inputs, exact)
    return pair, inputs, exact


def _exact_outputs(
    loop: Loop, pair: Loop, start: Sequence[bool], inputs: LoopInputs, bound: LoopOutputs
) -> LoopOutputs:
    """Which outputs have a tangent that is not identically zero, where the carry starts with these perturbed."""
    tangents = tangent_inputs(inputs)
    carry = (*(False for _ in bound.carry), *select(bound.carry, start))
    marked = (*tangents[: pair.carry_range.start], *carry, *tangents[pair.carry_range.stop :])
    flags = pair.outputs(dependence_fixpoint(pair.body, marked, pair.carry_range))
    dots = LoopOutputs(flags.carry[loop.num_carry :], flags.ys[len(bound.ys) :])
    nothing = LoopOutputs(*([False] * mask.count(False) for mask in bound))
    return map_leaves(bool, merge_each(bound, nothing, dots))


def _jvp_loop(loop: Loop, inputs: LoopInputs, outputs: LoopOutputs) -> Loop:
    sizes = list(map(len, inputs))
    body = jvp_body(loop.body, sizes, inputs, list(map(len, outputs)), outputs)
    return loop._replace(
        body=body,
        num_consts=loop.num_consts + sum(inputs.consts),
        num_carry=loop.num_carry + sum(inputs.carry),
        saved=loop.saved and (*loop.saved, *select(inputs.carry, loop.saved)),
        debug_info=loop.debug_info and loop.debug_info.renamed(loop.names.with_tangents(*inputs, outputs.ys)),
    )


def _if_counted(loop: Loop, row: Any, tangent: Any) -> Any:
    """NaN after more steps than can be counted, for then reverse mode cannot know how many to walk back."""
    if loop.bound is not None or not loop.predicated:
        return tangent
    return nan_if(row >= MOST_STEPS, tangent)


def jvp_of_results(
    loop: Loop, run: Callable[..., Outcome], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of a loop, or of a batch of it, and their tangents; `run` runs the loop on pairs."""
    if refused := undifferentiable_effects(loop.body):
        raise NotImplementedError(effects_message(refused))
    low, high, *operands = primals
    inputs, dots = loop.inputs(operands), loop.inputs(tangents[2:])
    pair, perturbed, outputs = jvp_loop(loop, map_leaves(is_nonzero, dots))
    tangent_operands = LoopInputs(*map(tangents_or_zeros, perturbed, inputs, dots))
    out = run(pair, low, high, *append_each(inputs, tangent_operands))
    saved = select(loop.saved_mask, outputs.carry)
    counts = [loop.num_carry, len(outputs.ys), len(saved)]
    (carry, carry_dots), (ys, y_dots), (saved_carries, saved_dots) = map(_cut, [out.carry, out.ys, out.saved], counts)
    carry_dots = [_if_counted(loop, low + out.num_steps, dot) for dot in carry_dots]
    results = Outcome(out.num_steps, carry, ys, saved_carries, out.checkpoint_rows).leaves
    mask = [False, *outputs.carry, *outputs.ys, *saved, *(False for _ in out.checkpoint_rows)]
    return results, fill_tangents(mask, results, [*carry_dots, *y_dots, *saved_dots])


def _cut(leaves: Sequence[Any], at: int) -> tuple[list[Any], list[Any]]:
    """Primals and tangents of a group."""
    return list(leaves[:at]), list(leaves[at:])


def loop_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """The loop on pairs of primals and tangents. Operands are `low, high, *consts, *carry, *xs`."""
    return jvp_of_results(Loop(**params), run, primals, tangents)
