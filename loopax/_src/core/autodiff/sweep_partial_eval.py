"""Partial evaluation and transpose of a reverse sweep: a known sweep, and its linear part."""

from collections.abc import Sequence
from operator import not_
from typing import Any, NamedTuple

from loopax._src.core.autodiff.partial_eval import known_part
from loopax._src.core.autodiff.sweep_jvp import sweep_fixpoint
from loopax._src.core.autodiff.sweep_transpose import (
    LinearSweep,
    LinearSweepOperands,
    linear_sweep_p,
    transpose_linear_sweep,
)
from loopax._src.core.ir.inverse import needed_by_inverse, part_of_inverse
from loopax._src.core.ir.loop import LoopOutputs, traversal
from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepInputs, SweepOperands, reverse_sweep_p, run_sweep
from loopax._src.core.ir.without_effects import without_effects
from loopax._src.core.jaxpr.operand_groups import (
    fill_each,
    flatten,
    map_leaves,
    merge_each,
    reject_each,
    select_each,
    unflatten,
)
from loopax._src.core.jaxpr.util import Mask, either, invert, weakly_cached
from loopax._src.core.masking.substitute import filled_in_derivatives
from loopax._src.jax_internals import ClosedJaxpr, ad, dce, happens, is_known, known_value, stage_unknown


class SweepPartialEval(NamedTuple):
    """A sweep in two parts: a known sweep, and its linear part."""

    known: ReverseSweep  # takes all known operands
    linear: LinearSweep
    unknown: SweepInputs  # which inputs are unknown, states and carry at the fixed point
    unknown_ys: Mask
    uses: SweepInputs  # which inputs the linear part uses

    @property
    def unknown_outputs(self) -> LoopOutputs:
        """Which results are those of the linear part."""
        return LoopOutputs(self.unknown.carry, self.unknown_ys)


@weakly_cached
def partial_eval_sweep(sweep: ReverseSweep, unknown: SweepInputs) -> SweepPartialEval:
    """Evaluate a sweep partially; `unknown` says which inputs are unknown at the start.

    Effects happen in the known part. The linear part does not repeat them.
    """
    unknown, ys = sweep_fixpoint(sweep, unknown, typed=False)
    known = known_sweep(sweep, unknown, ys)
    sweep = sweep._replace(step=without_effects(sweep.step))
    uses = needs(sweep, unknown.carry, ys)
    linear = LinearSweep(
        step_of(sweep, uses, (*uses.carry, *uses.state, *ys)),
        *map(tuple, select_each(uses, unknown)),
        num_forward_xs=sum(uses.xs[: sweep.num_forward_xs]),
        saving=sweep.saving,
        inverse=part_of_inverse(sweep.inverse, sweep.forward_inputs(uses), uses.state),
        **traversal(sweep),
    )
    return SweepPartialEval(known, linear, unknown, ys, uses)


def step_of(sweep: ReverseSweep, keep: SweepInputs, wanted: Sequence[bool]) -> ClosedJaxpr:
    """The step with these inputs and these results."""
    return known_part(sweep.step, [True, *sweep.backward_inputs(keep)], wanted)


def with_inputs(sweep: ReverseSweep, keep: SweepInputs, ys: Sequence[bool]) -> ReverseSweep:
    """The sweep with these inputs, and these ys."""
    return sweep._replace(
        step=step_of(sweep, keep, (*keep.carry, *keep.state, *ys)),
        inverse=part_of_inverse(sweep.inverse, sweep.forward_inputs(keep), keep.state),
        num_consts=sum(keep.consts),
        num_state=sum(keep.state),
        num_carry=sum(keep.carry),
        num_forward_xs=sum(keep.xs[: sweep.num_forward_xs]),
    )


def known_sweep(sweep: ReverseSweep, unknown: SweepInputs, ys: Mask) -> ReverseSweep:
    """The part of a sweep that depends on nothing unknown; it takes all known operands."""
    keep = map_leaves(not_, unknown)
    return with_inputs(sweep, keep, invert(ys))


def needs(sweep: ReverseSweep, carry: Sequence[bool], ys: Sequence[bool]) -> SweepInputs:
    """Which inputs of the bodies these outputs of a sweep need."""
    carry = tuple(carry)
    while True:
        used = sweep.of_backward(dce(sweep.backward, [*carry, *ys], False)[1][1:])
        if either(carry, used.carry) == carry:
            break
        carry = either(carry, used.carry)
    state = tuple(used.state)
    while True:
        ahead = sweep.of_forward(_needed_ahead(sweep, state))
        if either(state, ahead.state) == state:
            break
        state = either(state, ahead.state)
    forward_xs = [*ahead.xs, *(False,) * (len(used.xs) - len(ahead.xs))]
    return SweepInputs(either(used.consts, ahead.consts), state, carry, either(used.xs, forward_xs))


def _needed_ahead(sweep: ReverseSweep, state: Sequence[bool]) -> Sequence[bool]:
    """Which inputs of the forward body these states need, also where they are walked back to."""
    forward = dce(sweep.forward, state, False)[1][1:]
    return forward if sweep.inverse is None else either(forward, needed_by_inverse(sweep.inverse, state))


def linear_operands(parts: SweepPartialEval, low: Any, high: Any, operands: SweepOperands) -> LinearSweepOperands:
    """Those of the linear part. Leaves that become unknown on the way go in with their known start."""
    masks = select_each(parts.uses, parts.unknown)
    used = select_each(parts.uses, operands.inputs(operands.init))
    return LinearSweepOperands(low, high, reject_each(masks, used), select_each(masks, used))


def unknown_inputs(operands: SweepOperands) -> SweepInputs:
    """Which inputs of the bodies are unknown at the start, where these operands are."""
    unknown = map_leaves(bool, operands)
    return unknown.inputs(either(unknown.init, unknown.saved))


def sweep_partial_eval(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
    """Run the known part of a sweep now. Stage its linear part, which gets what it needs of the known part as operands.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`: saved have a row for each
    checkpoint, xs have `bound` rows, the others have none. Results are `*carry, *ys`. JAX asks where it evaluates a
    program on primals and tangents partially: primals are known then, tangents are not.

    A result is unknown if, after some number of steps, it depends on an unknown operand (`sweep_fixpoint`). The known
    sweep computes the other results alone, and causes the effects. The linear part gets only those known operands that
    it reads, and recomputes the states from `init`. The whole sweep is staged if its rows are unknown, if all its
    results are unknown and nothing happens on the way, or if no operand is.
    """
    sweep = ReverseSweep(**params)
    flags = [not is_known(t) for t in tracers]
    if any(flags[:3]) or not any(flags):
        return stage_unknown(trace, reverse_sweep_p, tracers, sweep._asdict())
    parts = partial_eval_sweep(sweep, unknown_inputs(sweep.operands(flags[3:])))
    if all(flatten(parts.unknown_outputs)) and not happens(parts.known.step.effects):
        return stage_unknown(trace, reverse_sweep_p, tracers, sweep._asdict())
    low, high, rows, *operands = map(known_value, tracers)
    known_operands = reject_each(SweepOperands.of(parts.unknown), sweep.operands(operands))
    known = run_sweep(parts.known, low, high, rows, *known_operands)
    # Leaves that become unknown on the way have a known start, hence the tracers.
    linear = linear_operands(parts, low, high, sweep.operands(tracers[3:]))
    out = stage_unknown(trace, linear_sweep_p, linear.leaves, parts.linear._asdict())
    unknown = unflatten(parts.linear.output_avals, out)
    return flatten(merge_each(parts.unknown_outputs, known, unknown))


def sweep_transpose(cts: Sequence[Any], low: Any, high: Any, _: Any, *operands: Any, **params: Any) -> list[Any]:
    """Transpose a sweep that is linear in some operands, where JAX does not linearise first (`jax.linear_transpose`).

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`; undefined primals are linear, the
    others are values. `cts` are the cotangents of `*carry, *ys`. Partial evaluation, with the linear operands as the
    unknown ones, gives the linear part, whose transpose is the answer. `saved` gets None: its states are computed from
    `init`, so all cotangents of states go to `init`.
    """
    sweep = ReverseSweep(**params)
    sweep = sweep._replace(step=filled_in_derivatives(sweep.step))
    flags = list(map(ad.is_undefined_primal, operands))
    parts = partial_eval_sweep(sweep, unknown_inputs(sweep.operands(flags)))
    given = linear_operands(parts, low, high, sweep.operands(operands))
    found = transpose_linear_sweep(select_each(parts.unknown_outputs, sweep.outputs(cts)), parts.linear, given)
    used = map_leaves(lambda is_unknown, is_used: is_unknown and is_used, parts.unknown, parts.uses)
    consts, init, carry, xs = fill_each(used, None, found)
    wanted = [*consts, *init, *(None for _ in init), *carry, *xs]
    return [None, None, None, *(ct if u else None for ct, u in zip(wanted, flags, strict=True))]
