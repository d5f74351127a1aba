"""Linearisation of a reverse sweep: the known part of the sweep on pairs runs now, the linear part later."""

from collections.abc import Sequence
from typing import Any

from loopax._src.core.autodiff.jvp import fill_tangents, tangents_or_zeros
from loopax._src.core.autodiff.linearize import Linear, only_marked, tangents_now
from loopax._src.core.autodiff.sweep_jvp import sweep_on_pairs
from loopax._src.core.autodiff.sweep_partial_eval import linear_operands, partial_eval_sweep, unknown_inputs
from loopax._src.core.autodiff.sweep_transpose import linear_sweep_p
from loopax._src.core.ir.loop import LoopOutputs
from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepOperands, as_bound, run_sweep
from loopax._src.core.jaxpr.operand_groups import map_leaves, merge_each, reject_each, select_each, unflatten
from loopax._src.core.jaxpr.varying_axes import varying


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
