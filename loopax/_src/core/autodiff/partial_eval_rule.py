"""Reverse mode: run what is known of a loop and leave the linear rest for the transpose.

JAX linearises by partial evaluation of the jvp, in which primals are known and tangents are not.
"""

from collections.abc import Sequence
from typing import Any

import jax

from loopax._src.core.autodiff.auto_policy import resolved
from loopax._src.core.autodiff.partial_eval import PartialEval, partial_eval
from loopax._src.core.autodiff.transpose import LinearLoop, LinearOperands, linear_loop_p, transpose_linear_loop
from loopax._src.core.effects.strip_progress import strip_progress_of_params
from loopax._src.core.ir.loop import Loop, Outcome, loop_p, run
from loopax._src.core.jaxpr.util import merge_lists, reject, select, split_list
from loopax._src.core.jaxpr.varying_axes import retyped
from loopax._src.jax_internals import (
    ClosedJaxpr,
    ad,
    is_known,
    jaxpr_as_fun,
    known_value,
    stage_unknown,
    varying_axes,
)


def run_known(
    loop: Loop, parts: PartialEval, unknown: Sequence[bool], low: Any, high: Any, operands: Sequence[Any]
) -> tuple[Outcome, list[Any]]:
    """Run the known part; returns the results that are known, and the known operands of the rest."""
    unknown_consts, _, unknown_xs = split_list(unknown, loop.sizes)
    consts, carry, xs = split_list(operands, loop.sizes)
    consts, xs = reject(unknown_consts, consts), reject(unknown_xs, xs)
    init = reject(parts.unknown_carry, carry)
    out = run(parts.known, low, high, consts, init, xs)

    ys, residual_rows = split_list(out.ys, [parts.num_known_ys])
    used_consts = reject(unknown_consts, parts.uses[0])
    used_xs = reject(unknown_xs, parts.uses[2])
    saved = dict(zip(select(parts.known.saved_mask, range(len(init))), out.saved, strict=True))
    replayed = [] if all(parts.linear.linear_carry) else select(parts.states, range(len(init)))
    saves = bool(replayed) and parts.linear.saving is not None
    rest = [
        *window_walked(loop, low, high, out.num_steps),
        *(_hoisted(parts.hoisted, consts, out) if parts.hoisted else select(used_consts, consts)),
        *select(reject(parts.unknown_carry, parts.last), out.carry),
        *(init[i] for i in replayed),
        *(saved[i] for i in replayed if saves),
        *(out.checkpoint_rows if saves else []),
        *select(used_xs, xs),
        *residual_rows,
    ]
    wanted = [i for i, keep in enumerate(reject(parts.unknown_carry, loop.saved_mask)) if keep]
    return Outcome(
        out.num_steps, out.carry, ys, [saved[i] for i in wanted], out.checkpoint_rows if loop.saving else []
    ), rest


def _hoisted(residuals: ClosedJaxpr, consts: Sequence[Any], out: Outcome) -> list[Any]:
    """Residuals that are the same at every step. In the body they may be said not to vary where they do."""
    axes = varying_axes(out.num_steps)
    return [retyped(x, varying_axes(x) | axes) for x in jaxpr_as_fun(residuals)(*consts)]


def window_walked(loop: Loop, low: Any, high: Any, num_steps: Any) -> tuple[Any, Any]:
    """The rows that the loop walked."""
    if not loop.predicated:
        return low, high
    return (high - num_steps, high) if loop.reverse else (low, low + num_steps)


def _linear_operands(loop: Loop, parts: PartialEval, unknown: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    """The operands of the rest that are linear."""
    unknown_consts, _, unknown_xs = split_list(unknown, loop.sizes)
    consts, carry, xs = split_list(operands, loop.sizes)
    return [
        *select(select(unknown_consts, parts.uses[0]), select(unknown_consts, consts)),
        *select(parts.unknown_carry, carry),
        *select(select(unknown_xs, parts.uses[2]), select(unknown_xs, xs)),
    ]


def _assemble(loop: Loop, parts: PartialEval, known: Outcome, linear: Sequence[Any]) -> list[Any]:
    """The loop's results from those of its two parts."""
    carry, ys, saved = split_list(linear, [sum(parts.unknown_carry), sum(parts.unknown_ys)])
    unknown_saved = select(loop.saved_mask, parts.unknown_carry)
    return [
        known.num_steps,
        *merge_lists(parts.unknown_carry, known.carry, carry),
        *merge_lists(parts.unknown_ys, known.ys, ys),
        *merge_lists(unknown_saved, known.saved, saved),
        *known.checkpoint_rows,
    ]


def loop_partial_eval(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
    """Run the known part of a loop, and stage its linear rest with what that needs of the known part.

    Operands are `low, high, *consts, *carry, *xs`. Unknown are those of tangents. Where the number of steps is unknown,
    or nothing is known of the results, the whole loop is staged.
    """
    loop = Loop(**params)
    unknown = tuple(not is_known(t) for t in tracers)
    if unknown[0] or unknown[1] or not any(unknown):
        return stage_unknown(trace, loop_p, tracers, loop._asdict())
    loop = resolved(loop, unknown[2:])
    parts = partial_eval(loop, unknown[2:])
    nothing_known = all(parts.unknown_carry) and all(parts.unknown_ys)
    if nothing_known or (loop.predicated and parts.unknown_carry[0]):
        return stage_unknown(trace, loop_p, tracers, loop._asdict())
    low, high, *operands = map(known_value, tracers)
    known, rest = run_known(loop, parts, unknown[2:], low, high, operands)
    # A leaf of the carry that becomes unknown on the way enters the rest with its known start.
    linear = _linear_operands(loop, parts, unknown[2:], tracers[2:])
    out = stage_unknown(trace, linear_loop_p, [*rest, *linear], parts.linear._asdict())
    return _assemble(loop, parts, known, out)


def loop_transpose(cts: Sequence[Any], low: Any, high: Any, *operands: Any, **params: Any) -> list[Any]:
    """Of a loop that is linear in some operands, where JAX transposes without linearising first: no forward pass."""
    loop = Loop(**strip_progress_of_params(params))
    unknown = tuple(map(ad.is_undefined_primal, operands))
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [None] * (2 + len(operands))
    loop = resolved(loop, unknown)
    parts = partial_eval(loop, unknown)
    _, rest = run_known(loop, parts, unknown, low, high, operands)
    linear = _linear_operands(loop, parts, unknown, operands)
    sizes = [1, loop.num_carry, len(loop.output_avals[1]), sum(loop.saved_mask)]
    _, ct_carry, ct_ys, ct_saved, _ = split_list(cts, sizes)
    linear_cts = [
        *select(parts.unknown_carry, ct_carry),
        *select(parts.unknown_ys, ct_ys),
        *select(select(loop.saved_mask, parts.unknown_carry), ct_saved),
    ]
    given = LinearOperands.of(parts.linear, [*rest, *linear])
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in linear]
    found = transpose_linear_loop(linear_cts, parts.linear, given, avals)
    return [None, None, *_cotangents_of_operands(loop, parts, unknown, found)]


def _cotangents_of_operands(loop: Loop, parts: PartialEval, unknown: Sequence[bool], cts: Sequence[Any]) -> list[Any]:
    """Cotangents of the rest's linear operands as cotangents of the loop's operands."""
    unknown_consts, unknown_init, unknown_xs = split_list(unknown, loop.sizes)
    static: LinearLoop = parts.linear
    consts, carry, xs = split_list(cts, static.linear_sizes[:2])
    used_consts = [u and used for u, used in zip(unknown_consts, parts.uses[0], strict=True)]
    used_xs = [u and used for u, used in zip(unknown_xs, parts.uses[2], strict=True)]

    def place(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
        return merge_lists(mask, [None] * mask.count(False), values)

    init = place(parts.unknown_carry, carry)
    init = [ct if u else None for ct, u in zip(init, unknown_init, strict=True)]
    return [*place(used_consts, consts), *init, *place(used_xs, xs)]
