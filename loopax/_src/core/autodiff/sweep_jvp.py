"""Forward mode through a reverse sweep: the sweep of the step on pairs of primals and tangents."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from loopax._src.core.autodiff.jvp import fill_tangents, inexact, jvp_body, refuse_effects, tangents_or_zeros
from loopax._src.core.ir.loop import LoopOutputs
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
    state = dependence_fixpoint(sweep.forward, inputs, sweep.state_range, allowed, sweep.inverse)
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
        step=jvp_body(sweep.step, [consts, carry, state, front, back], [carry, state, ys]),
        inverse=sweep.inverse and jvp_body(sweep.inverse, [consts, state, front], [state]),
        num_consts=sweep.num_consts + sum(consts),
        num_state=sweep.num_state + sum(state),
        num_carry=sweep.num_carry + sum(carry),
        num_forward_xs=sweep.num_forward_xs + sum(front),
    )


class SweepOnPairs(NamedTuple):
    """A sweep on pairs of primals and tangents."""

    sweep: ReverseSweep
    perturbed: SweepInputs  # which inputs of the bodies have a tangent, after any number of steps
    perturbed_ys: Mask
    num_forward_xs: int  # of the sweep on primals alone

    @property
    def mask(self) -> list[bool]:
        """Which results have a tangent."""
        return [*self.perturbed.carry, *self.perturbed_ys]

    def operands(self, primals: SweepOperands, tangents: SweepOperands) -> SweepOperands:
        """Primals with the tangents of those that have one. What stands for them may also be types or flags."""
        cut, cut_dots = self.num_forward_xs, sum(self.perturbed.xs[: self.num_forward_xs])
        xs = [*primals.xs[:cut], *tangents.xs[:cut_dots], *primals.xs[cut:], *tangents.xs[cut_dots:]]
        return append_each(primals, tangents)._replace(xs=xs)

    def split(self, out: LoopOutputs) -> tuple[list[Any], list[Any]]:
        """The results on primals, and the tangents of those that have one."""
        sizes = len(self.perturbed.carry), len(self.perturbed_ys)
        primals = [x for group, size in zip(out, sizes, strict=True) for x in group[:size]]
        return primals, [dot for group, size in zip(out, sizes, strict=True) for dot in group[size:]]


def sweep_on_pairs(sweep: ReverseSweep, nonzero: SweepOperands) -> SweepOnPairs:
    """The sweep on pairs, for operands of which these have a tangent."""
    refuse_effects(sweep.step)
    perturbed, ys = sweep_fixpoint(sweep, nonzero.inputs(either(nonzero.init, nonzero.saved)), typed=True)
    return SweepOnPairs(_jvp_sweep(sweep, perturbed, ys), perturbed, ys, sweep.num_forward_xs)


def sweep_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """The sweep on pairs of primals and tangents, whose states are pairs as well.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`; results are `*carry, *ys`. The
    step becomes one on pairs (`jvp_body`). If a state is perturbed, so is what was saved of it: the forward loop on
    pairs has saved pairs.
    """
    sweep = ReverseSweep(**params)
    low, high, checkpoint_rows, *leaves = primals
    operands, dots = sweep.operands(leaves), sweep.operands(tangents[3:])
    pairs = sweep_on_pairs(sweep, map_leaves(is_nonzero, dots))
    given = SweepOperands(*map(tangents_or_zeros, SweepOperands.of(pairs.perturbed), operands, dots))
    out = run_sweep(pairs.sweep, low, high, checkpoint_rows, *pairs.operands(operands, given))
    results, dots = pairs.split(out)
    return results, fill_tangents(pairs.mask, results, dots)
