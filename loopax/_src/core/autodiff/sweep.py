"""Forward mode through a reverse sweep: the sweep of the step on pairs of primals and tangents."""

from collections.abc import Sequence
from operator import not_
from typing import Any, NamedTuple

from loopax._src.core.autodiff.jvp import fill_tangents, jvp_body, refuse_effects, tangents_or_zeros
from loopax._src.core.autodiff.partial_eval import Linear, known_part, only_marked, tangents_now
from loopax._src.core.autodiff.sweep_transpose import (
    LinearSweep,
    LinearSweepOperands,
    linear_sweep_p,
    transpose_linear_sweep,
)
from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.ir.loop import LoopOutputs, needed_by_inverse, part_of_inverse, traversal
from loopax._src.core.ir.reverse_sweep import (
    ReverseSweep,
    SweepInputs,
    SweepOperands,
    as_bound,
    reverse_sweep_p,
    run_sweep,
)
from loopax._src.core.jaxpr.dependence import dependence, dependence_fixpoint, tangent_dependence
from loopax._src.core.jaxpr.types import varying
from loopax._src.core.jaxpr.util import (
    Mask,
    append_each,
    either,
    fill_each,
    flatten,
    grouped,
    invert,
    map_leaves,
    merge_each,
    reject_each,
    select_each,
    unflatten,
    weakly_cached,
)
from loopax._src.core.masking import filled_in_derivatives
from loopax._src.jax_internals import ad, dce, happens, is_known, is_nonzero, known_value, leave_for_later


def sweep_fixpoint(sweep: ReverseSweep, start: SweepInputs, typed: bool) -> tuple[SweepInputs, Mask]:
    """Which inputs of the bodies, and which ys, get a property that some have at the start.

    typed: it flows as tangents do.
    """
    flow = tangent_dependence if typed else dependence
    inputs = (False, *sweep.forward_inputs(start))
    state = dependence_fixpoint(sweep.forward, inputs, sweep.state_range, sweep.inverse, flow)
    inputs = (False, *sweep.backward_inputs(start._replace(state=state)))
    flags = dependence_fixpoint(sweep.backward, inputs, sweep.carry_range, of_program=flow)
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


# Partial evaluation and transpose of a reverse sweep: a known sweep, and its linear part.


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
    known = with_inputs(sweep, map_leaves(not_, unknown), invert(ys))
    sweep = sweep._replace(step=without_effects(sweep.step))
    uses = needs(sweep, unknown.carry, ys)
    linear = LinearSweep(
        known_part(sweep.step, [True, *sweep.backward_inputs(uses)], (*uses.carry, *uses.state, *ys)),
        *map(tuple, select_each(uses, unknown)),
        num_forward_xs=sum(uses.xs[: sweep.num_forward_xs]),
        plan=sweep.plan,
        saving=sweep.saving,
        inverse=part_of_inverse(sweep.inverse, sweep.forward_inputs(uses), uses.state),
        **traversal(sweep),
    )
    return SweepPartialEval(known, linear, unknown, ys, uses)


def with_inputs(sweep: ReverseSweep, keep: SweepInputs, ys: Sequence[bool]) -> ReverseSweep:
    """The sweep with these inputs, and these ys."""
    return sweep._replace(
        step=known_part(sweep.step, [True, *sweep.backward_inputs(keep)], (*keep.carry, *keep.state, *ys)),
        inverse=part_of_inverse(sweep.inverse, sweep.forward_inputs(keep), keep.state),
        num_consts=sum(keep.consts),
        num_state=sum(keep.state),
        num_carry=sum(keep.carry),
        num_forward_xs=sum(keep.xs[: sweep.num_forward_xs]),
    )


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
        forward = dce(sweep.forward, state, False)[1][1:]
        if sweep.inverse is not None:  # also where they are walked back to
            forward = either(forward, needed_by_inverse(sweep.inverse, state))
        ahead = grouped(SweepInputs, forward, sweep.num_consts, sweep.num_state, 0)
        if either(state, ahead.state) == state:
            break
        state = either(state, ahead.state)
    forward_xs = [*ahead.xs, *(False,) * (len(used.xs) - len(ahead.xs))]
    return SweepInputs(either(used.consts, ahead.consts), state, carry, either(used.xs, forward_xs))


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
    it reads, and recomputes the states from `init`. The whole sweep is left for later if its rows are unknown, if all
    its results are unknown and nothing happens on the way, or if no operand is.
    """
    sweep = ReverseSweep(**params)
    flags = [not is_known(t) for t in tracers]
    if any(flags[:3]) or not any(flags):
        return leave_for_later(trace, reverse_sweep_p, tracers, sweep._asdict())
    parts = partial_eval_sweep(sweep, unknown_inputs(sweep.operands(flags[3:])))
    if all(flatten(parts.unknown_outputs)) and not happens(parts.known.step.effects):
        return leave_for_later(trace, reverse_sweep_p, tracers, sweep._asdict())
    low, high, rows, *operands = map(known_value, tracers)
    known_operands = reject_each(SweepOperands.of(parts.unknown), sweep.operands(operands))
    known = run_sweep(parts.known, low, high, rows, *known_operands)
    # Leaves that become unknown on the way have a known start, hence the tracers.
    linear = linear_operands(parts, low, high, sweep.operands(tracers[3:]))
    out = leave_for_later(trace, linear_sweep_p, linear.leaves, parts.linear._asdict())
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


# Linearisation of a reverse sweep: the known part of the sweep on pairs runs now, the linear part later.


def sweep_linearize(
    nonzero: Sequence[bool], low: Any, high: Any, checkpoint_rows: Any, *leaves: Any, **params: Any
) -> tuple[list[Any], list[bool], Linear]:
    """Run the known part of the sweep on pairs now; its linear part is the function of tangents.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`, results `*carry, *ys`; `nonzero`
    says which operands have a tangent. The linear part gets the tangents of `init`, and recomputes those of the states
    from them: what was saved has no tangents of its own.
    """
    sweep = ReverseSweep(**params)
    operands, is_nonzero = sweep.operands(leaves), map_leaves(bool, sweep.operands(nonzero[3:]))
    pairs = sweep_on_pairs(sweep, is_nonzero)
    perturbed = SweepOperands.of(pairs.perturbed)
    unknown = pairs.operands(map_leaves(lambda _: False, operands), select_each(perturbed, is_nonzero))
    bound, axes = as_bound(pairs.sweep, low, high, checkpoint_rows)
    parts = partial_eval_sweep(bound, unknown_inputs(unknown))
    starts = SweepOperands(*map(tangents_now, perturbed, operands, is_nonzero))
    known_operands = reject_each(SweepOperands.of(parts.unknown), pairs.operands(operands, starts))
    known = run_sweep(parts.known, low, high, checkpoint_rows, *known_operands)
    later = LoopOutputs(*([None] * sum(mask) for mask in parts.unknown_outputs))
    results, now = pairs.split(merge_each(parts.unknown_outputs, known, later))
    depends = iter([tangent is None for tangent in now])
    mask = [flag and next(depends) for flag in pairs.mask]

    def linear(*tangents: Any) -> list[Any]:
        dots = SweepOperands(*map(tangents_or_zeros, perturbed, operands, sweep.operands(tangents[3:])))
        inputs = SweepOperands(*(varying(group, axes) for group in pairs.operands(operands, dots)))
        given = linear_operands(parts, low, high, inputs)
        out = linear_sweep_p.bind(*given.leaves, **parts.linear._asdict())
        _, found = pairs.split(merge_each(parts.unknown_outputs, known, unflatten(later, out)))
        return only_marked(mask, results, fill_tangents(pairs.mask, results, found))

    return results, mask, linear
