"""Derivatives of a batch of loops whose numbers of steps are not known at the start.

Forward mode is the batch of the loop on pairs. Reverse mode lets the known part run in stages, storing nothing. The
numbers of steps are known then, so the linear rest is that of lanes in groups: each group walks forward once more,
storing what its kind says, and in the end back. Stages would have to store what they pass, each in its own way, and
compile as many forward and backward loops as there are stages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from loopax._src.core.autodiff.jvp import jvp_of_results, nonzero_mask
from loopax._src.core.autodiff.partial_eval import known_loop, prune, unknown_outputs
from loopax._src.core.autodiff.partial_eval_rule import window_walked
from loopax._src.core.autodiff.remat_dce import stage_all
from loopax._src.core.batching.compact.loop import LOOPS, nothing_saved
from loopax._src.core.batching.compact.primitive import (
    CompactVmap,
    compact_vmap,
    compact_vmap_of,
    compact_vmap_p,
    jvp_of_program,
)
from loopax._src.core.effects.guard import without_effects
from loopax._src.core.ir.loop import Loop, Outcome, outcome
from loopax._src.core.jaxpr.util import Mask, invert, merge_lists, reject, select, split_list
from loopax._src.jax_internals import evaluate_partially, is_known, known_value, stage_unknown


def _runs_in_stages(inner: CompactVmap) -> bool:
    return inner.rules is LOOPS and inner.static.predicated


def compact_vmap_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """The batch of the loop on pairs, where lanes run in stages; else the derivative of the program."""
    inner = CompactVmap(**params)
    if not _runs_in_stages(inner):
        return jvp_of_program(primals, tangents, **params)
    windows, consts, _, xs = split_list(inner.mapped, [2, *inner.static.sizes])
    perturbed = nonzero_mask(tangents[2:])
    perturbed_consts, _, perturbed_xs = split_list(perturbed, inner.static.sizes)

    def run(pair: Loop, low: Any, high: Any, *groups: Sequence[Any]) -> Outcome:
        pairs_of_consts = (*consts, *select(perturbed_consts, consts))
        pairs_of_xs = (*xs, *select(perturbed_xs, xs))
        mapped = (*windows, *pairs_of_consts, *(True,) * pair.num_carry, *pairs_of_xs)
        operands = [low, high, *(x for group in groups for x in group)]
        return outcome(pair, compact_vmap(LOOPS, pair, inner.axis, mapped, operands))

    return jvp_of_results(inner.static, run, primals, tangents)


class _BatchPartialEval(NamedTuple):
    """A loop divided by what is known of its operands: consts, carry and xs."""

    known: Loop
    rest: Loop  # lanes with a known number of steps
    unknown_carry: Mask
    unknown_ys: Mask
    only_in_rest: Mask  # operands that `known` does not have
    only_in_known: Mask  # operands that `rest` does not have
    new_in_rest: Mask  # which leaves of its carry are unknown


def _partial_eval_loop(loop: Loop, unknown: Mask) -> _BatchPartialEval:
    consts, _, xs = (tuple(m) for m in split_list(unknown, loop.sizes))
    carry, ys = unknown_outputs(loop, unknown)
    body, (used_consts, used_carry, used_xs) = prune(without_effects(loop.body), loop.sizes, carry, ys)
    rest = loop._replace(
        body=body,
        num_consts=sum(used_consts),
        num_carry=sum(used_carry),
        predicated=False,
        saving=None,
        saved=(),
        reporting=None,
    )
    return _BatchPartialEval(
        known_loop(loop, consts, carry, xs, ys),
        rest,
        carry,
        ys,
        only_in_rest=(*consts, *carry, *xs),
        only_in_known=invert((*used_consts, *used_carry, *used_xs)),
        new_in_rest=tuple(select(used_carry, carry)),
    )


def _steps_are_known(inner: CompactVmap, unknown: Sequence[bool]) -> bool:
    if not _runs_in_stages(inner) or any(unknown[:2]) or not any(unknown):
        return False
    return not unknown_outputs(inner.static, tuple(unknown[2:]))[0][0]


def compact_vmap_partial_eval(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
    """Run the known part in stages, and evaluate the rest, as lanes in groups with known numbers of steps, partially.

    Operands are those of the loop, with an axis of lanes where they are mapped. Where numbers of steps are not known,
    the whole batch is staged.
    """
    inner = CompactVmap(**params)
    unknown = tuple(not is_known(t) for t in tracers)
    if not _steps_are_known(inner, unknown):
        return stage_unknown(trace, compact_vmap_p, tracers, params)
    window, operands = split_list(tracers, [2])
    low, high = map(known_value, window)
    parts = _partial_eval_loop(inner.static, unknown[2:])
    mapped = (*inner.mapped[:2], *reject(parts.only_in_rest, inner.mapped[2:]))
    values = map(known_value, reject(parts.only_in_rest, operands))
    out = outcome(parts.known, compact_vmap(LOOPS, parts.known, inner.axis, mapped, [low, high, *values]))

    windows = (True, inner.mapped[1]) if parts.rest.reverse else (inner.mapped[0], True)
    mapped = (*windows, *reject(parts.only_in_known, inner.mapped[2:]))
    # Leaves that become unknown on the way enter the rest with their known start, hence the tracers.
    operands = [*window_walked(parts.known, low, high, out.num_steps), *reject(parts.only_in_known, operands)]
    program = compact_vmap_of(LOOPS, parts.rest, inner.axis, mapped, list(map(jax.typeof, operands))).program
    rest = outcome(parts.rest, evaluate_partially(trace, program, operands))
    return [
        out.num_steps,
        *merge_lists(parts.unknown_carry, out.carry, select(parts.new_in_rest, rest.carry)),
        *merge_lists(parts.unknown_ys, out.ys, rest.ys),
        *nothing_saved(inner.static, inner.axis),
    ]


def compact_vmap_partial_eval_custom(_: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any) -> Any:
    """In `jax.checkpoint`: run the known part now; stage the whole batch, for nothing of it is to be stored."""
    inner = CompactVmap(**eqn.params)
    if not _steps_are_known(inner, unknown):
        return stage_all(eqn, instantiated)
    parts = _partial_eval_loop(inner.static, tuple(unknown[2:]))
    unknown_in = [False, False, *parts.only_in_rest]
    saved = select(inner.static.saved_mask, parts.unknown_carry)
    unknown_out = [False, *parts.unknown_carry, *parts.unknown_ys, *saved, *([False] if inner.static.saving else [])]
    invars = reject(unknown_in, eqn.invars)
    known = compact_vmap_of(
        LOOPS, parts.known, inner.axis, tuple(reject(unknown_in, inner.mapped)), [v.aval for v in invars]
    )
    part = eqn.replace(
        invars=invars,
        outvars=reject(unknown_out, eqn.outvars),
        params=known._asdict(),
        effects=known.program.effects,
    )
    return stage_all(eqn, instantiated, part, unknown_out)
