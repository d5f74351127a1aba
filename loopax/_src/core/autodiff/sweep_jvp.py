"""Forward mode through a reverse sweep: the sweep of both bodies on pairs of primals and tangents."""

from collections.abc import Sequence
from typing import Any

from loopax._src.core.autodiff.jvp import fill_tangents, inexact, jvp_body, nonzero_mask, tangents_or_zeros
from loopax._src.core.ir.reverse_sweep import ReverseSweep, run_sweep
from loopax._src.core.jaxpr.dataflow import dependence_fixpoint
from loopax._src.core.jaxpr.util import Mask, either, select, split_list, weakly_cached


def sweep_fixpoint(
    static: ReverseSweep, consts: Mask, state: Mask, carry: Mask, xs: Mask, typed: bool
) -> tuple[Mask, Mask, Mask]:
    """To which states, leaves of the carry and ys a property spreads; `typed`: only to inexact ones."""
    start = 1 + static.num_consts
    allowed = inexact(static.forward.out_avals) if typed else None
    forward_xs = xs[: static.num_forward_xs]
    state = dependence_fixpoint(
        static.forward, (False, *consts, *state, *forward_xs), range(start, start + static.num_state), allowed
    )
    allowed = inexact(static.backward.out_avals) if typed else None
    flags = dependence_fixpoint(
        static.backward, (False, *consts, *carry, *state, *xs), range(start, start + static.num_carry), allowed
    )
    carry, ys = (tuple(m) for m in split_list(flags, [static.num_carry]))
    return state, carry, ys


@weakly_cached
def _jvp_sweep(static: ReverseSweep, consts: Mask, state: Mask, carry: Mask, xs: Mask, ys: Mask) -> ReverseSweep:
    front, back = xs[: static.num_forward_xs], xs[static.num_forward_xs :]
    return static._replace(
        forward=jvp_body(
            static.forward,
            [static.num_consts, static.num_state, len(front)],
            [consts, state, front],
            [static.num_state],
            [state],
        ),
        backward=jvp_body(
            static.backward,
            [static.num_consts, static.num_carry, static.num_state, len(front), len(back)],
            [consts, carry, state, front, back],
            [static.num_carry, len(ys)],
            [carry, ys],
        ),
        num_consts=static.num_consts + sum(consts),
        num_state=static.num_state + sum(state),
        num_carry=static.num_carry + sum(carry),
        num_forward_xs=static.num_forward_xs + sum(front),
    )


def sweep_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """The sweep on pairs, whose states are pairs as well.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`; where a state is perturbed, so is
    what was saved of it.
    """
    static = ReverseSweep(**params)
    low, high, checkpoint_rows, *operands = primals
    consts, init, saved, carry, xs = split_list(operands, static.sizes)
    const_dots, init_dots, saved_dots, carry_dots, x_dots = split_list(tangents[3:], static.sizes)
    consts_mask, xs_mask = nonzero_mask(const_dots), nonzero_mask(x_dots)
    started = either(nonzero_mask(init_dots), nonzero_mask(saved_dots))
    state_mask, carry_mask, ys_mask = sweep_fixpoint(
        static, consts_mask, started, nonzero_mask(carry_dots), xs_mask, typed=True
    )
    pair = _jvp_sweep(static, consts_mask, state_mask, carry_mask, xs_mask, ys_mask)
    cut = static.num_forward_xs
    new_carry, ys = run_sweep(
        pair,
        low,
        high,
        checkpoint_rows,
        [*consts, *select(consts_mask, const_dots)],
        [*init, *tangents_or_zeros(state_mask, init, init_dots)],
        [*saved, *tangents_or_zeros(state_mask, saved, saved_dots)],
        [*carry, *tangents_or_zeros(carry_mask, carry, carry_dots)],
        [
            *xs[:cut],
            *select(xs_mask[:cut], x_dots[:cut]),
            *xs[cut:],
            *select(xs_mask[cut:], x_dots[cut:]),
        ],
    )
    new_carry, new_carry_dots = split_list(new_carry, [static.num_carry])
    ys, y_dots = split_list(ys, [len(ys_mask)])
    results = [*new_carry, *ys]
    return results, fill_tangents([*carry_mask, *ys_mask], results, [*new_carry_dots, *y_dots])
