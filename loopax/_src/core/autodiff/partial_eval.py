"""Partial evaluation of a loop: a known loop, and the linear part that depends on unknown inputs.

The linear part needs the known carry of each step. How the known loop hands it over is the loop's `storage`: the states
before some steps, the state before every step, or the residuals of every step.
"""

from collections.abc import Sequence
from operator import not_
from typing import Any, NamedTuple

from loopax._src.core.ir.debug_info import DebugInfo
from loopax._src.core.ir.inverse import part_of_inverse
from loopax._src.core.ir.linear_loop import LinearLoop
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, traversal
from loopax._src.core.ir.plan import Plan
from loopax._src.core.ir.without_effects import without_effects
from loopax._src.core.jaxpr.dataflow import dependence_fixpoint, needed_inputs
from loopax._src.core.jaxpr.mixed_lanes import mixing_primitive
from loopax._src.core.jaxpr.operand_groups import flatten, map_leaves, select_each, unflatten
from loopax._src.core.jaxpr.residuals import Residual, classified, hoisted_part, without_recomputed
from loopax._src.core.jaxpr.util import (
    Mask,
    either,
    invert,
    merge_lists,
    num_bytes,
    reject,
    select,
    trace,
    weakly_cached,
)
from loopax._src.core.row_buffers.versions import buffers, frozen_body, keep_rows
from loopax._src.jax_internals import ClosedJaxpr, dce, jaxpr_as_fun, partial_eval_jaxpr, replace_jaxpr
from loopax._src.schedule.saving import Blocks, Saving


class PartialEval(NamedTuple):
    """A loop in two parts: a known loop, and its linear part."""

    known: Loop  # takes all known inputs; its last ys may be residuals
    linear: LinearLoop
    unknown: LoopInputs  # which inputs are unknown, the carry at the fixed point
    unknown_outputs: LoopOutputs
    uses: LoopInputs  # which inputs the linear part uses
    last: Mask = ()  # of which known leaves of the carry it is given the last version (`row_buffers/versions.py`)
    hoisted: ClosedJaxpr | None = None  # known consts -> residuals that are the same at every step
    residual_avals: tuple[Any, ...] = ()  # the types of a step's residuals, also of those that are not stored

    @property
    def num_known_ys(self) -> int:
        """Rows of ys of the known loop that are the original loop's, not residuals."""
        return self.unknown_outputs.ys.count(False)

    @property
    def stored(self) -> Sequence[Any]:
        """The types of what the known loop stores of a step: a carry if it saves some, else further rows of ys."""
        rows = self.known.output_avals.ys[self.num_known_ys :]
        return select(self.states, self.known.output_avals.carry) if self.linear.saving else rows

    @property
    def states(self) -> Mask:
        """Which known leaves of the carry the linear part uses."""
        return tuple(reject(self.unknown.carry, self.uses.carry))


@weakly_cached
def partial_eval(loop: Loop, unknown: LoopInputs) -> PartialEval:
    """Evaluate a loop partially: a known loop, and a linear part of what depends on unknown inputs.

    The loop's storage is a plan already (`planning.py`).
    """
    plan = loop.storage
    assert isinstance(plan, Plan)
    if plan.stores_residuals:
        parts = _keep_residuals(loop, plan, unknown)
        if not mixing_primitive(parts.linear.body):
            return parts
    outputs = unknown_outputs(loop, unknown)
    unknown = unknown._replace(carry=outputs.carry)
    known = known_loop(loop, unknown, outputs)
    loop, body, uses = _linear_body_and_inverse(loop, plan, unknown, outputs)
    inverse = part_of_inverse(loop.inverse, flatten(uses), uses.carry)
    appended = buffers(loop.body, loop.carry_range, True)
    last = tuple(map(all, zip(appended, uses.carry, invert(unknown.carry), invert(loop.saved_mask), strict=True)))
    if any(last):
        sizes, is_last = [sum(uses.consts), sum(uses.carry)], tuple(select(uses.carry, last))
        body, inverse = frozen_body(body, sizes, is_last), inverse and _frozen_inverse(inverse, sizes, is_last)
        uses = uses._replace(carry=tuple(used and not is_last for used, is_last in zip(uses.carry, last, strict=True)))
    linear = select_each(uses, unknown)
    part = LinearLoop(
        body,
        (*linear.consts, *(False,) * sum(last)),
        tuple(linear.carry),
        tuple(linear.xs),
        saving=loop.saving,
        saved=tuple(select(unknown.carry, loop.saved_mask)) if loop.saving else (),
        inverse=inverse,
        **traversal(loop),
    )
    parts = PartialEval(known, part, unknown, outputs, uses, last)
    if plan.error or not any(parts.states):
        return parts
    saving = _saving(loop, plan, parts)
    if saving is None and mixing_primitive(part.body):
        # What is read of other lanes is not in rows: lanes that have finished have written none.
        saving = Blocks(1)
    return _keep_some_carries(parts, saving) if saving else _keep_every_carry(parts)


def _frozen_inverse(inverse: ClosedJaxpr, sizes: Sequence[int], is_last: Mask) -> ClosedJaxpr | None:
    """The inverse, which is given the last versions of buffers; None where it does more than read their rows."""
    num_consts, num_carry = sizes
    unchanged = keep_rows(inverse, range(1 + num_consts, 1 + num_consts + num_carry))
    return frozen_body(inverse, sizes, is_last) if all(select(is_last, unchanged)) else None


def _linear_body_and_inverse(
    loop: Loop, plan: Plan, unknown: LoopInputs, outputs: LoopOutputs
) -> tuple[Loop, ClosedJaxpr, LoopInputs]:
    """The body of the linear part, and its inputs. The loop keeps its inverse only if states are walked back to."""
    forward = loop._replace(inverse=None)
    body, uses = prune(forward, without_effects(loop.body), outputs)
    if loop.inverse is None or not plan.walks_back or not any(reject(unknown.carry, uses.carry)):
        return forward, body, uses
    return loop, *prune(loop, without_effects(loop.body), outputs)


def _saving(loop: Loop, plan: Plan, parts: PartialEval) -> Saving | None:
    """Which states that the linear part uses the known loop keeps; None: all of them."""
    carry_bytes = num_bytes(select(parts.states, parts.known.output_avals.carry))
    has_inverse = parts.linear.inverse is not None
    return loop.saving or plan.saving(loop.bound, carry_bytes, not loop.predicated, has_inverse)


def unknown_outputs(loop: Loop, unknown: LoopInputs) -> LoopOutputs:
    """Which leaves of the carry and which ys depend on unknown inputs, at the fixed point."""
    inputs = (False, *flatten(unknown))
    flags = dependence_fixpoint(loop.body, inputs, loop.carry_range, inverse=loop.inverse)
    return LoopOutputs(*map(tuple, loop.outputs(flags)))


def known_loop(loop: Loop, unknown: LoopInputs, outputs: LoopOutputs) -> Loop:
    """The part of the loop that depends on nothing unknown; it takes all known inputs."""
    reporting = loop.reporting
    if loop.active_count_index is not None and unknown.carry[loop.active_count_index]:
        reporting = reporting and reporting._replace(counts_lanes=False)
    known = map_leaves(not_, unknown)
    return loop._replace(
        debug_info=_names_of_known(loop, unknown, outputs),
        reporting=reporting,
        body=known_part(loop.body, [True, *flatten(known)], invert(flatten(outputs))),
        inverse=part_of_inverse(loop.inverse, flatten(known), known.carry),
        num_consts=sum(known.consts),
        num_carry=sum(known.carry),
        saved=tuple(reject(unknown.carry, loop.saved)) if loop.saved else (),
    )


def _names_of_known(loop: Loop, unknown: LoopInputs, outputs: LoopOutputs) -> DebugInfo | None:
    return loop.debug_info and loop.debug_info.renamed(loop.names.keep(*map(invert, (*unknown, outputs.ys))))


def known_part(body: ClosedJaxpr, inputs: list[bool], outputs: Sequence[bool]) -> ClosedJaxpr:
    """What known inputs give, and the effects, which depend on nothing else."""
    known, used = dce(body, outputs, inputs)
    if used == inputs:
        return known
    # An effect inside an equation with unknown operands (a `cond`, an inner loop), which JAX can evaluate partially.
    known, _, _ = partial_eval_jaxpr(body, invert(inputs), invert(outputs))
    residuals = len(known.out_avals) - sum(outputs)
    return dce(known, [True] * sum(outputs) + [False] * residuals, True)[0]


def prune(loop: Loop, body: ClosedJaxpr, outputs: LoopOutputs) -> tuple[ClosedJaxpr, LoopInputs]:
    """The loop's body with what these outputs need after any number of steps, and which inputs that is.

    Inputs that the inverse needs to walk these leaves of the carry back are among them.
    """
    keep = needed_inputs(body, loop.carry_range, flatten(outputs), loop.inverse)
    inputs = LoopInputs(*map(tuple, loop.inputs(keep[1:])))
    pruned, _ = dce(body, flatten(outputs._replace(carry=inputs.carry)), [True, *keep[1:]])
    return pruned, inputs


def _keep_some_carries(parts: PartialEval, saving: Saving) -> PartialEval:
    """The known loop saves the states that the linear part needs, with those it saves already."""
    known = parts.known
    saved = either(known.saved_mask, parts.states)
    return parts._replace(known=known._replace(saving=saving, saved=saved), linear=parts.linear._replace(saving=saving))


def _keep_every_carry(parts: PartialEval) -> PartialEval:
    """The known loop writes the states that the linear part needs as rows, which that part reads as rows of xs."""
    known, linear = parts.known, parts.linear
    inputs, outputs = known.body.jaxpr.invars, known.body.jaxpr.outvars
    states = select(parts.states, [inputs[i] for i in known.carry_range])
    known = known._replace(body=replace_jaxpr(known.body, inputs, [*outputs, *states]))

    jaxpr = linear.body.jaxpr
    consts, carry, xs = linear.inputs(jaxpr.invars[1:])
    new_carry, ys = linear.outputs(jaxpr.outvars)
    body = replace_jaxpr(
        linear.body,
        [jaxpr.invars[0], *consts, *select(linear.linear_carry, carry), *xs, *reject(linear.linear_carry, carry)],
        [*select(linear.linear_carry, new_carry), *ys],
    )
    linear = linear._replace(
        body=dce(body, [True] * len(body.out_avals), True)[0],
        linear_carry=(True,) * sum(linear.linear_carry),
        linear_xs=(*linear.linear_xs, *(False,) * len(states)),
    )
    return parts._replace(known=known, linear=linear)


def _keep_residuals(loop: Loop, plan: Plan, unknown: LoopInputs) -> PartialEval:
    """Let JAX evaluate the body partially; residuals become constants, rows of xs, or new rows of ys."""
    known, later, outputs = _partial_eval_body(loop, unknown)
    unknown = unknown._replace(carry=outputs.carry)
    num_outputs = flatten(outputs).count(False)
    sizes = [mask.count(False) for mask in unknown]
    residuals = classified(known, sizes, range(num_outputs, len(known.out_avals)), loop.bound == 1)
    of_steps = [r.position for r in residuals if not r.hoisted and r.forwarded is None]
    rows, again = (of_steps, None) if plan.keeps_all else without_recomputed(known, [], of_steps, [])
    recomputed = Recomputed(rows, [p for p in of_steps if p not in rows], again)
    loop_body = replace_jaxpr(known, known.jaxpr.invars, [known.jaxpr.outvars[p] for p in (*range(num_outputs), *rows)])
    x_used = tuple(any(r.forwarded == i for r in residuals) for i in range(sizes[2]))
    linear = LinearLoop(
        _linear_body(loop, later, residuals, recomputed, unknown),
        linear_consts=(False,) * sum(r.hoisted for r in residuals) + (True,) * sum(unknown.consts),
        linear_carry=(True,) * sum(unknown.carry),
        linear_xs=(False,) * (sum(x_used) + len(rows)) + (True,) * sum(unknown.xs),
        **traversal(loop),
    )
    return PartialEval(
        loop._replace(
            debug_info=_names_of_known(loop, unknown, outputs),
            body=dce(loop_body, [True] * len(loop_body.out_avals), True)[0],
            inverse=None,
            num_consts=sizes[0],
            num_carry=sizes[1],
        ),
        linear,
        unknown,
        outputs,
        uses=unknown._replace(xs=tuple(merge_lists(unknown.xs, x_used, (True,) * sum(unknown.xs)))),
        last=(False,) * loop.num_carry,
        residual_avals=tuple(known.out_avals[p] for p in of_steps),
        hoisted=hoisted_part(without_effects(known), sizes[0], [r.position for r in residuals if r.hoisted]),
    )


def _partial_eval_body(loop: Loop, unknown: LoopInputs) -> tuple[ClosedJaxpr, ClosedJaxpr, LoopOutputs]:
    """JAX's partial evaluation of the body, at the fixed point of what is unknown of the carry."""
    outputs = unknown_outputs(loop, unknown)
    while True:
        inputs = [False, *flatten(unknown._replace(carry=outputs.carry))]
        known, later, flags = partial_eval_jaxpr(loop.body, inputs, flatten(outputs))
        found = LoopOutputs(*map(tuple, loop.outputs(flags)))
        if either(outputs.carry, found.carry) == outputs.carry:
            return known, without_effects(later), found._replace(carry=outputs.carry)
        outputs = outputs._replace(carry=either(outputs.carry, found.carry))


class Recomputed(NamedTuple):
    """Residuals of each step of which some are rows, and the others are computed from these."""

    rows: list[int]  # positions among the outputs of the known body
    others: list[int]
    function: ClosedJaxpr | None  # rows -> others

    def found(self, rows: Sequence[Any]) -> dict[int, Any]:
        """All of them by position."""
        others = jaxpr_as_fun(self.function)(*rows) if self.function else []
        return dict(zip((*self.rows, *self.others), (*rows, *others), strict=True))


class _LinearInputs(NamedTuple):
    """What stands for each input of the body of a linear part that reads residuals, behind the row."""

    hoisted: Sequence[Any]  # residuals that are the same at every step
    consts: Sequence[Any]
    carry: Sequence[Any]
    forwarded: Sequence[Any]  # residuals that are rows of known xs
    stacked: Sequence[Any]  # residuals of each step
    xs: Sequence[Any]


def _linear_body(
    loop: Loop, later: ClosedJaxpr, residuals: Sequence[Residual], recomputed: Recomputed, unknown: LoopInputs
) -> ClosedJaxpr:
    """(row, *hoisted, *consts, *carry, *forwarded x, *residual rows, *x) -> (*carry, *y)."""
    function = jaxpr_as_fun(later)
    avals = later.in_avals[: len(residuals)]
    forwarded = sorted({r.forwarded for r in residuals if r.forwarded is not None})
    first_of = {f: next(a for r, a in zip(residuals, avals, strict=True) if r.forwarded == f) for f in forwarded}
    masks = LoopInputs(*((True,) * sum(mask) for mask in unknown))
    consts, carry, xs = unflatten(masks, later.in_avals[len(residuals) :])
    inputs = _LinearInputs(
        hoisted=[a for r, a in zip(residuals, avals, strict=True) if r.hoisted],
        consts=consts,
        carry=carry,
        forwarded=[first_of[f] for f in forwarded],
        stacked=[a for r, a in zip(residuals, avals, strict=True) if r.position in recomputed.rows],
        xs=xs,
    )

    def body(_: Any, *operands: Any) -> list[Any]:
        given = unflatten(inputs, operands)
        hoisted, found = iter(given.hoisted), recomputed.found(given.stacked)
        values = [
            next(hoisted)
            if r.hoisted
            else found[r.position]
            if r.forwarded is None
            else given.forwarded[forwarded.index(r.forwarded)]
            for r in residuals
        ]
        return function(*values, *given.consts, *given.carry, *given.xs)

    return trace(body, [loop.body.in_avals[0], *flatten(inputs)])
