"""Forward mode: the same loop on pairs of primals and tangents, for what has a tangent at all."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.ir.loop import Loop, Outcome, run
from loopax._src.core.jaxpr.dataflow import dependence_fixpoint
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
    perturbed: Sequence[Mask],
    num_outputs: Sequence[int],
    wanted: Sequence[Mask],
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


def tangent_inputs(groups: Sequence[Mask]) -> Mask:
    """Among the inputs of a joint body, which are tangents, if the given groups have these."""
    return (False, *(flag for group in groups for flag in ((False,) * len(group) + (True,) * sum(group))))


@weakly_cached
def jvp_loop(loop: Loop, nonzero: Mask) -> tuple[Loop, Mask, Mask]:
    """The loop on pairs, and which leaves of the carry and which ys have a tangent.

    Which have is a least fixed point. A first bound comes from what depends on what; the tangents of
    the traced body then say exactly, for the derivative of a dependence may be zero.
    """
    consts, init, xs = split_list(nonzero, loop.sizes)
    allowed = inexact(loop.body.out_avals)
    flags = dependence_fixpoint(loop.body, (False, *nonzero), loop.carry_range, allowed)
    carry, ys = (tuple(m) for m in split_list(flags, [loop.num_carry]))
    pair = _jvp_loop(loop, tuple(consts), carry, tuple(xs), ys)

    start = tuple(a for a, b in zip(init, carry, strict=True) if b)
    marked = tangent_inputs([tuple(consts), carry, tuple(xs)])
    marked = (*marked[: pair.carry_range.start + loop.num_carry], *start, *marked[pair.carry_range.stop :])
    exact = dependence_fixpoint(pair.body, marked, pair.carry_range)
    _, carry_dots, _, y_dots = split_list(exact, [loop.num_carry, sum(carry), len(ys)])
    exact_carry = tuple(merge_lists(carry, (False,) * carry.count(False), carry_dots))
    exact_ys = tuple(merge_lists(ys, (False,) * ys.count(False), y_dots))
    if (exact_carry, exact_ys) != (carry, ys):
        pair = _jvp_loop(loop, tuple(consts), exact_carry, tuple(xs), exact_ys)
    return pair, exact_carry, exact_ys


def _jvp_loop(loop: Loop, consts: Mask, carry: Mask, xs: Mask, ys: Mask) -> Loop:
    sizes = [*loop.sizes, len(xs)]
    body = jvp_body(loop.body, sizes, [consts, carry, xs], [loop.num_carry, len(ys)], [carry, ys])
    saved = loop.saved and (*loop.saved, *select(carry, loop.saved))
    return loop._replace(
        body=body,
        num_consts=loop.num_consts + sum(consts),
        num_carry=loop.num_carry + sum(carry),
        saved=saved,
        debug_info=loop.debug_info and loop.debug_info.renamed(loop.names.with_tangents(consts, carry, xs, ys)),
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
    nonzero = nonzero_mask(tangents[2:])
    pair, carry_mask, ys_mask = jvp_loop(loop, nonzero)
    consts, carry, xs = split_list(operands, loop.sizes)
    const_dots, carry_dots, x_dots = split_list(tangents[2:], loop.sizes)
    consts_mask, _, xs_mask = split_list(nonzero, loop.sizes)
    out = run(
        pair,
        low,
        high,
        [*consts, *select(consts_mask, const_dots)],
        [*carry, *tangents_or_zeros(carry_mask, carry, carry_dots)],
        [*xs, *select(xs_mask, x_dots)],
    )
    saved_mask = select(loop.saved_mask, carry_mask)
    new_carry, new_carry_dots = split_list(out.carry, [loop.num_carry])
    ys, y_dots = split_list(out.ys, [len(ys_mask)])
    saved, saved_dots = split_list(out.saved, [len(saved_mask)])
    new_carry_dots = [_if_counted(loop, low + out.num_steps, dot) for dot in new_carry_dots]
    results = [out.num_steps, *new_carry, *ys, *saved, *out.checkpoint_rows]
    mask = [False, *carry_mask, *ys_mask, *saved_mask, *(False for _ in out.checkpoint_rows)]
    return results, fill_tangents(mask, results, [*new_carry_dots, *y_dots, *saved_dots])


def loop_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """The loop on pairs of primals and tangents. Operands are `low, high, *consts, *carry, *xs`."""
    return jvp_of_results(Loop(**params), run, primals, tangents)
