"""Partial evaluation and transpose of a reverse sweep: a known sweep, and the linear rest."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from loopax._src.core.autodiff.sweep_jvp import sweep_fixpoint
from loopax._src.core.autodiff.sweep_transpose import (
    LinearSweep,
    LinearSweepOperands,
    linear_sweep_p,
    transpose_linear_sweep,
)
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p, run_sweep
from loopax._src.core.jaxpr.util import Mask, either, invert, merge_lists, reject, select, split_list, weakly_cached
from loopax._src.jax_internals import ad, dce, is_known, known_value, stage_unknown


class SweepPartialEval(NamedTuple):
    """A sweep in two parts."""

    known: ReverseSweep  # takes all known operands
    linear: LinearSweep
    unknown_state: Mask
    unknown_carry: Mask
    unknown_ys: Mask
    uses: tuple[Mask, Mask, Mask, Mask]  # which consts, states, carry leaves and xs the rest uses


@weakly_cached
def partial_eval_sweep(static: ReverseSweep, consts: Mask, started: Mask, carry: Mask, xs: Mask) -> SweepPartialEval:
    """Divide a sweep; the masks say what is unknown."""
    state, carry, ys = sweep_fixpoint(static, consts, started, carry, xs, typed=False)
    unknown = (consts, state, carry, xs)
    known = known_sweep(static, unknown, ys)
    uses = needs(static, carry, ys)
    linear = LinearSweep(
        *bodies(static, uses, (*uses[2], *ys)),
        *(tuple(select(used, mask)) for used, mask in zip(uses, unknown, strict=True)),
        num_forward_xs=sum(uses[3][: static.num_forward_xs]),
        bound=static.bound,
        saving=static.saving,
        reverse=static.reverse,
        unroll=static.unroll,
        storage=static.storage,
        stages=static.stages,
    )
    return SweepPartialEval(known, linear, state, carry, ys, uses)


def bodies(static: ReverseSweep, keep: Sequence[Mask], wanted: Sequence[bool]) -> tuple[Any, Any]:
    """Both bodies with these consts, states, carry leaves and xs, and these outputs of the backward one."""
    consts, state, carry, xs = keep
    forward, used = dce(static.forward, state, [True, *consts, *state, *xs[: static.num_forward_xs]])
    assert used == [True, *consts, *state, *xs[: static.num_forward_xs]]
    backward, used = dce(static.backward, wanted, [True, *consts, *carry, *state, *xs])
    assert used == [True, *consts, *carry, *state, *xs]
    return forward, backward


def known_sweep(static: ReverseSweep, unknown: Sequence[Mask], ys: Mask) -> ReverseSweep:
    """The part of a sweep that depends on nothing unknown; it takes all known operands."""
    keep = [invert(mask) for mask in unknown]
    consts, state, carry, xs = keep
    forward, backward = bodies(static, keep, (*carry, *invert(ys)))
    return static._replace(
        forward=forward,
        backward=backward,
        num_consts=sum(consts),
        num_state=sum(state),
        num_carry=sum(carry),
        num_forward_xs=sum(xs[: static.num_forward_xs]),
    )


def needs(static: ReverseSweep, carry: Mask, ys: Mask) -> tuple[Mask, Mask, Mask, Mask]:
    """Which consts, states, carry leaves and xs these outputs of a sweep need."""
    while True:
        used = dce(static.backward, [*carry, *ys], False)[1]
        _, consts, used_carry, state, xs = split_list(used, [1, static.num_consts, static.num_carry, static.num_state])
        if either(carry, used_carry) == carry:
            break
        carry = either(carry, used_carry)
    while True:
        used = dce(static.forward, state, False)[1]
        _, forward_consts, used_state, forward_xs = split_list(used, [1, static.num_consts, static.num_state])
        if either(state, used_state) == tuple(state):
            break
        state = either(state, used_state)
    padded = [*forward_xs, *(False,) * (len(xs) - len(forward_xs))]
    return either(consts, forward_consts), tuple(state), carry, either(xs, padded)


def _run_known(
    parts: SweepPartialEval, unknown: Sequence[Mask], window: Sequence[Any], groups: Sequence[list[Any]]
) -> Any:
    consts, xs = reject(unknown[0], groups[0]), reject(unknown[4], groups[4])
    init, saved = (reject(parts.unknown_state, group) for group in groups[1:3])
    carry = reject(parts.unknown_carry, groups[3])
    low, high, checkpoint_rows = window
    return run_sweep(parts.known, low, high, checkpoint_rows, consts, init, saved, carry, xs)


def _rest(parts: SweepPartialEval, unknown: Sequence[Mask], groups: Sequence[list[Any]]) -> list[Any]:
    """The operands of the linear rest, known ones first."""
    masks = [unknown[0], parts.unknown_state, parts.unknown_carry, unknown[4]]
    used = [
        (select(use, mask), select(use, group))
        for use, mask, group in zip(parts.uses, masks, [groups[0], groups[1], groups[3], groups[4]], strict=True)
    ]
    return [
        *(x for mask, group in used for x in reject(mask, group)),
        *(x for mask, group in used for x in select(mask, group)),
    ]


def _partial_eval_known(static: ReverseSweep, unknown: Sequence[Mask]) -> SweepPartialEval:
    return partial_eval_sweep(static, unknown[0], either(unknown[1], unknown[2]), unknown[3], unknown[4])


def sweep_partial_eval(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
    """Run the known part of a sweep, and stage its linear rest.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`. Unknown are those of tangents. Where
    one of the first three is unknown, or nothing is known of the results, the whole sweep is staged.
    """
    static = ReverseSweep(**params)
    flags = [not is_known(t) for t in tracers]
    if any(flags[:3]) or not any(flags):
        return stage_unknown(trace, reverse_sweep_p, tracers, static._asdict())
    unknown = [tuple(mask) for mask in split_list(flags[3:], static.sizes)]
    parts = _partial_eval_known(static, unknown)
    if all(parts.unknown_carry) and all(parts.unknown_ys):
        return stage_unknown(trace, reverse_sweep_p, tracers, static._asdict())
    window, operands = split_list(map(known_value, tracers), [3])
    carry, ys = _run_known(parts, unknown, window, split_list(operands, static.sizes))
    # Leaves that become unknown on the way enter the rest with their known start, hence the tracers.
    rest = _rest(parts, unknown, split_list(tracers[3:], static.sizes))
    out = stage_unknown(trace, linear_sweep_p, [*window[:2], *rest], parts.linear._asdict())
    linear_carry, linear_ys = split_list(out, [sum(parts.unknown_carry)])
    return [*merge_lists(parts.unknown_carry, carry, linear_carry), *merge_lists(parts.unknown_ys, ys, linear_ys)]


def sweep_transpose(cts: Sequence[Any], low: Any, high: Any, _: Any, *operands: Any, **params: Any) -> list[Any]:
    """Of a sweep that is linear in some operands, where JAX transposes without linearising first."""
    static = ReverseSweep(**params)
    flags = list(map(ad.is_undefined_primal, operands))
    unknown = [tuple(mask) for mask in split_list(flags, static.sizes)]
    parts = _partial_eval_known(static, unknown)
    rest = _rest(parts, unknown, split_list(operands, static.sizes))
    ct_carry, ct_ys = split_list(cts, [static.num_carry])
    cts = [*select(parts.unknown_carry, ct_carry), *select(parts.unknown_ys, ct_ys)]
    given = LinearSweepOperands.of(parts.linear, [low, high, *rest])
    consts, init, carry, xs = transpose_linear_sweep(cts, parts.linear, given)
    masks = [unknown[0], parts.unknown_state, parts.unknown_carry, unknown[4]]
    used = [tuple(a and b for a, b in zip(m, use, strict=True)) for m, use in zip(masks, parts.uses, strict=True)]
    consts, init, carry, xs = (
        merge_lists(mask, [None] * mask.count(False), group)
        for mask, group in zip(used, (consts, init, carry, xs), strict=True)
    )
    found = [*consts, *init, *(None for _ in init), *carry, *xs]
    return [None, None, None, *(ct if u else None for ct, u in zip(found, flags, strict=True))]
