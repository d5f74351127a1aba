"""Forward mode through a reverse sweep: the sweep of both bodies on pairs of primals and tangents."""

from collections.abc import Sequence
from typing import Any

from loopax._src.core.autodiff.jvp import fill_tangents, inexact, jvp_body, tangents_or_zeros
from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepInputs, SweepOperands, run_sweep
from loopax._src.core.jaxpr.dataflow import dependence_fixpoint
from loopax._src.core.jaxpr.operand_groups import append_each, map_leaves
from loopax._src.core.jaxpr.util import Mask, either, weakly_cached
from loopax._src.jax_internals import is_nonzero


def sweep_fixpoint(sweep: ReverseSweep, start: SweepInputs, typed: bool) -> tuple[SweepInputs, Mask]:
    """Which inputs of the bodies, and which ys, get a property that some have at the start.

    typed: only those that can have a tangent get it.
    """
    allowed = inexact(sweep.forward.out_avals) if typed else None
    inputs = (False, *sweep.forward_inputs(start))
    state = dependence_fixpoint(sweep.forward, inputs, sweep.state_range, allowed)
    allowed = inexact(sweep.backward.out_avals) if typed else None
    inputs = (False, *sweep.backward_inputs(start._replace(state=state)))
    flags = dependence_fixpoint(sweep.backward, inputs, sweep.carry_range, allowed)
    carry, ys = map(tuple, sweep.outputs(flags))
    return SweepInputs(tuple(start.consts), state, carry, tuple(start.xs)), ys


@weakly_cached
def _jvp_sweep(sweep: ReverseSweep, perturbed: SweepInputs, ys: Mask) -> ReverseSweep:
    """The sweep on pairs. Rows of xs that the forward body reads come first, with their tangents behind them."""
    consts, state, carry, xs = perturbed
    front, back = xs[: sweep.num_forward_xs], xs[sweep.num_forward_xs :]
    return sweep._replace(
        forward=jvp_body(sweep.forward, [consts, state, front], [state]),
        backward=jvp_body(sweep.backward, [consts, carry, state, front, back], [carry, ys]),
        num_consts=sweep.num_consts + sum(consts),
        num_state=sweep.num_state + sum(state),
        num_carry=sweep.num_carry + sum(carry),
        num_forward_xs=sweep.num_forward_xs + sum(front),
    )


def sweep_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """The sweep on pairs of primals and tangents, whose states are pairs as well.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`; results are `*carry, *ys`. Both
    bodies become bodies on pairs (`jvp_body`). If a state is perturbed, so is what was saved of it: the forward loop on
    pairs has saved pairs.
    """
    sweep = ReverseSweep(**params)
    low, high, checkpoint_rows, *leaves = primals
    operands, dots = sweep.operands(leaves), sweep.operands(tangents[3:])
    nonzero = map_leaves(is_nonzero, dots)
    perturbed, ys_mask = sweep_fixpoint(sweep, nonzero.inputs(either(nonzero.init, nonzero.saved)), typed=True)
    pair = _jvp_sweep(sweep, perturbed, ys_mask)
    given = SweepOperands(*map(tangents_or_zeros, SweepOperands.of(perturbed), operands, dots))
    cut, cut_dots = sweep.num_forward_xs, sum(perturbed.xs[: sweep.num_forward_xs])
    xs = [*operands.xs[:cut], *given.xs[:cut_dots], *operands.xs[cut:], *given.xs[cut_dots:]]
    pairs = append_each(operands, given)._replace(xs=xs)
    carry, ys = run_sweep(pair, low, high, checkpoint_rows, *pairs)
    results = [*carry[: sweep.num_carry], *ys[: len(ys_mask)]]
    dots = [*carry[sweep.num_carry :], *ys[len(ys_mask) :]]
    return results, fill_tangents([*perturbed.carry, *ys_mask], results, dots)
