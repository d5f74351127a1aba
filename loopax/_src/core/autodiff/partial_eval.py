"""Partial evaluation of a loop: a known loop, and the linear part that depends on unknown inputs.

The linear part needs the known carry of each step. How the known loop hands it over is its plan: the states
before some steps, the state before every step, or the residuals of every step.
"""

from collections.abc import Callable, Sequence
from operator import and_, not_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.core.autodiff.jvp import jvp_loop, refuse_effects, split_pairs, tangents_of_results, tangents_or_zeros
from loopax._src.core.autodiff.planning import in_two, joined, plan_of
from loopax._src.core.autodiff.transpose import transpose_linear_loop, type_of_linear
from loopax._src.core.buffer_versions import body_of_last_versions, buffers, ends, loop_of_last_versions
from loopax._src.core.ir.annotations import DebugInfo, strip_progress_of_params, without_effects
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lane_choice import of_parts
from loopax._src.core.ir.linear_loop import LinearLoop, LinearOperands, linear_loop_p
from loopax._src.core.ir.loop import (
    BoundLoop,
    Loop,
    LoopInputs,
    LoopOutputs,
    Outcome,
    loop_p,
    part_of_inverse,
    run,
    traversal,
)
from loopax._src.core.ir.plan import Blocks, Plan
from loopax._src.core.jaxpr.cost import classified, hoisted_part, without_recomputed
from loopax._src.core.jaxpr.dependence import dependence_fixpoint, mixing_primitive, needed_inputs
from loopax._src.core.jaxpr.narrow import narrow
from loopax._src.core.jaxpr.types import retyped
from loopax._src.core.jaxpr.util import (
    Mask,
    append_each,
    either,
    fill_each,
    flatten,
    invert,
    map_leaves,
    merge_lists,
    num_bytes,
    reject,
    reject_each,
    select,
    select_each,
    split_list,
    trace,
    unflatten,
    weakly_cached,
)
from loopax._src.core.masking import filled_always, filled_in_derivatives, without_derivative
from loopax._src.core.waiting import without_waiting
from loopax._src.jax_internals import ClosedJaxpr, ad, jaxpr_as_fun


class PartialEval(NamedTuple):
    """A loop in two parts: a known loop, and its linear part."""

    known: Loop  # takes all known inputs; its last ys may be residuals
    linear: LinearLoop
    # The masks of `c, d = f(a, b, c, d)` with unknown d and consts a, b, where `d' = a c d`: unknown and taken are
    # (F F | F T), used is (T F | T).
    unknown: LoopInputs  # a flag for each input of the loop, the carry at the fixed point
    unknown_outputs: LoopOutputs
    used: LoopInputs  # a flag for each known input: does the linear part read it? (Of the carry: before each step.)
    taken: LoopInputs  # a flag for each input: is it one of the linear part? (Of the carry: all unknown leaves.)
    last: Mask = ()  # of the known carry: buffers that the linear part reads after the last step (`buffer_versions.py`)
    hoisted: ClosedJaxpr | None = None  # (*known consts, *last versions) -> residuals that are the same at every step

    @property
    def num_known_ys(self) -> int:
        """Rows of ys of the known loop that are the original loop's, not residuals."""
        return self.unknown_outputs.ys.count(False)

    @property
    def states(self) -> Sequence[Any]:
        """The types of the known leaves of the carry that the linear part reads before each step."""
        return select(self.used.carry, self.known.output_avals.carry)

    @property
    def stored(self) -> Sequence[Any]:
        """The types of what the known loop stores of a step: a carry if it saves some, else further rows of ys."""
        return self.states if self.linear.saving else self.known.output_avals.ys[self.num_known_ys :]


@weakly_cached
def partial_eval(loop: Loop, plan: Plan, unknown: LoopInputs) -> PartialEval:
    """Evaluate a loop partially: a known loop, and a linear part of what depends on unknown inputs."""
    lanes, body = of_parts(loop.lanes, loop.body, loop.num_consts), without_waiting(loop.body)
    loop = loop._replace(body=body, kind=Decided(plan), lanes=lanes)
    if plan.stores_residuals and not loop.saving:
        parts = _keep_residuals(loop, plan, unknown)
        # A body that mixes lanes reads what other lanes have (a collective, say). Lanes that are done have written no
        # rows of residuals, so that their carries are saved below.
        if not mixing_primitive(parts.linear.body):
            return parts
    outputs = unknown_outputs(loop, unknown)
    unknown = unknown._replace(carry=outputs.carry)
    known = known_loop(loop, unknown, outputs)

    # Of what the last version says for all before it, the linear part is given that one, and no other is stored. A leaf
    # that the loop saves has its versions saved already.
    # Before: [*consts, *carry, *xs]. After: [*consts, *last versions, *rest of the carry, *xs].
    read = loop if plan.walks_back else loop._replace(inverse=None)
    final = buffers(loop.body, loop.carry_range, "appends" if read.inverse else "final")
    is_last = tuple(map(all, zip(final, invert(unknown.carry), invert(loop.saved_mask), strict=True)))
    read = loop_of_last_versions(read, is_last) if any(is_last) else read
    wanted = outputs._replace(carry=tuple(reject(is_last, outputs.carry)))

    # The linear part has what its outputs need of the body, known or not. It keeps the inverse only where states are
    # walked back to, since the inverse may read more inputs.
    body, inverse = without_effects(read.body), read.inverse
    forward, uses = prune(read._replace(inverse=None), body, wanted)
    if inverse is None or not any(reject(wanted.carry, uses.carry)):
        body, inverse = forward, None
    else:
        body, uses = prune(read, body, wanted)
        inverse = part_of_inverse(inverse, flatten(uses), uses.carry)
    consts, of_last = split_list(uses.consts, [loop.num_consts])
    last = tuple(reject(unknown.carry, merge_lists(is_last, [False] * is_last.count(False), of_last)))
    uses = LoopInputs(consts, merge_lists(is_last, uses.carry, [False] * sum(is_last)), uses.xs)

    linear_consts, linear_carry, linear_xs = map(tuple, select_each(uses, unknown))
    linear = LinearLoop(
        body,
        (*linear_consts, *(False,) * sum(last)),
        linear_carry,
        linear_xs,
        plan=plan,
        saving=loop.saving,
        saved=tuple(select(unknown.carry, loop.saved_mask)) if loop.saving else (),
        inverse=inverse,
        watch=loop.watch,
        **traversal(loop),
    )
    used = LoopInputs(*map(tuple, reject_each(unknown, uses)))
    taken = map_leaves(and_, unknown, uses._replace(carry=unknown.carry))
    parts = PartialEval(known, linear, unknown, outputs, used, taken, last)
    # A plan with an error has no reverse mode: who transposes the linear part raises it (`transpose.py`).
    if plan.error or not parts.states:
        return parts
    saving = loop.saving or plan._saving(
        bound=loop.bound,
        carry_bytes=num_bytes(parts.states),
        length_known=not loop.predicated,
        has_inverse=inverse is not None,
    )
    if saving is None and mixing_primitive(linear.body):
        # What is read of other lanes is not in rows: lanes that have finished have written none.
        saving = Blocks(1)
    if saving is None:  # none is chosen among the carries: rows have all of them
        return _keep_every_carry(parts)
    # The known loop saves what the linear part reads, with what it saves already.
    known = known._replace(saving=saving, saved=either(known.saved_mask, used.carry))
    return parts._replace(known=known, linear=linear._replace(saving=saving))


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
        body=without_derivative(known_part(loop.body, [True, *flatten(known)], invert(flatten(outputs)))),
        inverse=part_of_inverse(loop.inverse, flatten(known), known.carry),
        num_consts=sum(known.consts),
        **loop.kept(known.carry),
    )


def _names_of_known(loop: Loop, unknown: LoopInputs, outputs: LoopOutputs) -> DebugInfo | None:
    return loop.debug_info and loop.debug_info.renamed(loop.names.keep(*map(invert, (*unknown, outputs.ys))))


def known_part(body: ClosedJaxpr, inputs: list[bool], outputs: Sequence[bool]) -> ClosedJaxpr:
    """What known inputs give, and the effects, which depend on nothing else."""
    known, used = jaxi.dce(body, outputs, inputs)
    if used == inputs:
        return known
    # An effect inside an equation with unknown operands (a `cond`, an inner loop), which JAX can evaluate partially.
    known, _, _ = jaxi.partial_eval_jaxpr(body, invert(inputs), invert(outputs))
    residuals = len(known.out_avals) - sum(outputs)
    return jaxi.dce(known, [True] * sum(outputs) + [False] * residuals, True)[0]


def prune(loop: Loop, body: ClosedJaxpr, outputs: LoopOutputs) -> tuple[ClosedJaxpr, LoopInputs]:
    """The loop's body with what these outputs need after any number of steps, and which inputs that is.

    Inputs that the inverse needs to walk these leaves of the carry back are among them.
    """
    keep = needed_inputs(body, loop.carry_range, flatten(outputs), loop.inverse)
    inputs = LoopInputs(*map(tuple, loop.inputs(keep[1:])))
    pruned, _ = jaxi.dce(body, flatten(outputs._replace(carry=inputs.carry)), [True, *keep[1:]])
    return pruned, inputs


def _keep_every_carry(parts: PartialEval) -> PartialEval:
    """The known loop writes the states that the linear part needs as rows, which that part reads as rows of xs."""
    known, linear = parts.known, parts.linear
    inputs, outputs = known.body.invars, known.body.outvars
    states = select(parts.used.carry, [inputs[i] for i in known.carry_range])
    known = known._replace(body=jaxi.replace_jaxpr(known.body, inputs, [*outputs, *states]))

    # Before: (row, *consts, *carry, *xs) -> (*carry, *ys).
    # After: (row, *consts, *linear carry, *xs, *known carry) -> (*linear carry, *ys).
    row, *operands = linear.body.invars
    inputs, outputs = linear.inputs(operands), linear.outputs(linear.body.outvars)
    of_carry = map_leaves(lambda _: True, inputs)._replace(carry=linear.linear_carry)
    operands = [*flatten(select_each(of_carry, inputs)), *flatten(reject_each(of_carry, inputs))]
    body = jaxi.replace_jaxpr(linear.body, [row, *operands], flatten(select_each(linear.linear_outputs, outputs)))
    linear = linear._replace(
        body=jaxi.dce(body, [True] * len(body.out_avals), True)[0],
        linear_carry=(True,) * sum(linear.linear_carry),
        linear_xs=(*linear.linear_xs, *(False,) * len(states)),
    )
    return parts._replace(known=known, linear=linear)


class _LinearInputs(NamedTuple):
    """What stands for each input of the body of a linear part that reads residuals, behind the row."""

    hoisted: Sequence[Any]  # residuals that are the same at every step
    ends: Sequence[Any]  # of lanes, after the last step
    consts: Sequence[Any]
    carry: Sequence[Any]
    forwarded: Sequence[Any]  # residuals that are rows of known xs
    stacked: Sequence[Any]  # residuals of each step
    xs: Sequence[Any]


def _keep_residuals(loop: Loop, plan: Plan, unknown: LoopInputs) -> PartialEval:
    """Let JAX evaluate the body partially; residuals become constants, rows of xs, or new rows of ys."""
    outputs = unknown_outputs(loop, unknown)
    while True:
        unknown = unknown._replace(carry=outputs.carry)
        known, later, flags = jaxi.partial_eval_jaxpr(loop.body, [False, *flatten(unknown)], flatten(outputs))
        found = LoopOutputs(*map(tuple, loop.outputs(flags)))
        # JAX may call more outputs unknown than depend on unknown inputs: all of an equation that it cannot divide. At
        # the fixed point, no more of the carry becomes unknown.
        outputs = found._replace(carry=either(outputs.carry, found.carry))
        if outputs.carry == unknown.carry:
            break
    num_outputs = flatten(outputs).count(False)
    later, num_residuals = without_effects(later), len(known.out_avals) - num_outputs
    of_residuals, of_others = split_list(later.in_avals, [num_residuals])
    known, sizes = filled_always(known), [mask.count(False) for mask in unknown]  # sums over lanes read residuals
    _, consts, _, xs = split_list(known.invars, [1, *sizes[:2]])
    stored = narrow(known, num_outputs, of_residuals, free=[*consts, *xs])
    known = stored.known

    # Which lanes are active in a row follows from their ends after the last step.
    # Before: (row, *consts, *carry, *x) -> (*carry, *y, *residuals)
    # After: (row, *consts, *ends, *rest of the carry, *x) -> (*rest of the carry, *y, *residuals)
    carried = range(1 + sizes[0], 1 + sizes[0] + sizes[1])
    are_ends = tuple(not plan.keeps_all and is_end for is_end in ends(known, carried))
    num_ends = sum(are_ends)
    known_after = body_of_last_versions(known, sizes[:2], are_ends) if num_ends else known
    sizes = [sizes[0] + num_ends, sizes[1] - num_ends, sizes[2]]
    positions = range(num_outputs - num_ends, len(known_after.out_avals))
    residuals = classified(known_after, sizes, positions, loop.bound == 1)
    of_steps = [r.position for r in residuals if not r.hoisted and r.forwarded is None]
    # Fewer rows, and a program that computes the other residuals from them where that is cheaper than to store them.
    given = [0, *range(1 + sizes[0] - num_ends, 1 + sizes[0])]
    rows, again = (of_steps, None) if plan.keeps_all else without_recomputed(known_after, given, of_steps, [])
    kept = [*range(num_outputs), *(num_ends + p for p in rows)]
    loop_body = jaxi.replace_jaxpr(known, known.invars, [known.outvars[p] for p in kept])
    x_used = tuple(any(r.forwarded == i for r in residuals) for i in range(sizes[2]))

    # Before: (*residuals, *consts, *carry, *x) -> (*carry, *y).
    # After: (row, *hoisted, *ends, *consts, *carry, *forwarded x, *residual rows, *x) -> (*carry, *y).
    avals = dict(zip((r.position for r in residuals), stored.avals, strict=True))
    # The first of those that are the same row of xs counts.
    sources = {r.forwarded: avals[r.position] for r in reversed(residuals) if r.forwarded is not None}
    forwarded = sorted(sources)
    masks = LoopInputs(*((True,) * sum(mask) for mask in unknown))
    consts, carry, xs = unflatten(masks, of_others)
    inputs = _LinearInputs(
        hoisted=[avals[r.position] for r in residuals if r.hoisted],
        ends=select(are_ends, known.in_avals[carried.start : carried.stop]),
        consts=consts,
        carry=carry,
        forwarded=[sources[place] for place in forwarded],
        stacked=[avals[p] for p in of_steps if p in rows],
        xs=xs,
    )

    def linear_body(row: Any, *operands: Any) -> list[Any]:
        given = unflatten(inputs, operands)
        # By position, the residuals of each step: those that are rows, and those that are computed from these.
        others = [p for p in of_steps if p not in rows]
        more = jaxpr_as_fun(again)(row, *given.ends, *given.stacked) if again else []
        found = dict(zip((*rows, *others), (*given.stacked, *more), strict=True))
        hoisted = iter(given.hoisted)
        values = [
            next(hoisted)
            if r.hoisted
            else found[r.position]
            if r.forwarded is None
            else given.forwarded[forwarded.index(r.forwarded)]
            for r in residuals
        ]
        return jaxpr_as_fun(later)(*stored.repeated(values), *given.consts, *given.carry, *given.xs)

    linear = LinearLoop(
        trace(linear_body, [loop.body.in_avals[0], *flatten(inputs)]),
        linear_consts=(False,) * (len(inputs.hoisted) + num_ends) + (True,) * sum(unknown.consts),
        linear_carry=(True,) * sum(unknown.carry),
        linear_xs=(False,) * (sum(x_used) + len(rows)) + (True,) * sum(unknown.xs),
        plan=plan,
        watch=loop.watch,
        **traversal(loop),
    )
    return PartialEval(
        loop._replace(
            debug_info=_names_of_known(loop, unknown, outputs),
            body=jaxi.dce(loop_body, [True] * len(loop_body.out_avals), True)[0],
            inverse=None,
            num_consts=sum(invert(unknown.consts)),
            **loop.kept(invert(unknown.carry)),
        ),
        linear,
        unknown,
        outputs,
        used=LoopInputs((False,) * sum(invert(unknown.consts)), (False,) * len(are_ends), x_used),
        taken=unknown,
        last=are_ends,
        hoisted=hoisted_part(without_effects(known_after), sizes[0], [r.position for r in residuals if r.hoisted]),
    )


# Partial evaluation of a loop under JAX's transformations: run the known part, and leave the linear part for later.
#
# JAX asks where a loop stands in a body that is evaluated partially. For the derivative of the loop itself it asks
# `loop_linearize`.


def run_known(
    loop: Loop, parts: PartialEval, low: Any, high: Any, inputs: LoopInputs
) -> tuple[Outcome, LinearOperands]:
    """Run the known part; returns the results that are known, and the operands of the linear part.

    inputs: of the loop; those that are unknown go into the linear part as they are. A leaf of the carry that becomes
    unknown on the way goes in with its known start.
    """
    known = reject_each(parts.unknown, inputs)
    if loop.idles and loop.bound is not None:  # no lane waits for others (`without_waiting`)
        high = jnp.minimum(high, loop.bound)
    out = run(parts.known, low, high, *known)
    stops = parts.known.stops  # the same steps again, in each lane
    known = known._replace(carry=[out.carry[i] if i in stops else x for i, x in enumerate(known.carry)])
    ys, residual_rows = out.ys[: parts.num_known_ys], out.ys[parts.num_known_ys :]
    # Of each leaf of the known carry: its saved rows, if the known loop saves it.
    rows_of_saved = iter(out.saved)
    saved = [next(rows_of_saved) if is_saved else None for is_saved in parts.known.saved_mask]
    used = select_each(parts.used, known)
    reads_states = not all(parts.linear.linear_carry)  # before each step; if not, it reads them as rows
    is_saved = reads_states and parts.linear.saving is not None
    consts = used.consts
    if parts.hoisted:  # the types of these residuals in the body may not say that they vary where they do
        axes = jaxi.varying_axes(out.num_steps)
        residuals = jaxpr_as_fun(parts.hoisted)(*known.consts, *select(parts.last, out.carry))
        consts = [retyped(x, jaxi.varying_axes(x) | axes) for x in residuals]
    operands = LinearOperands(
        *limits_walked(loop, low, high, out.num_steps),
        known=LoopInputs(
            [*consts, *select(parts.last, out.carry)], used.carry if reads_states else [], [*used.xs, *residual_rows]
        ),
        saved=select(parts.used.carry, saved) if is_saved else [],
        checkpoint_rows=out.checkpoint_rows if is_saved else [],
        linear=select_each(parts.taken, inputs),
    )
    saved_by_loop = reject(parts.unknown.carry, loop.saved_mask)  # of the known carry, what the whole loop saves
    rows = out.checkpoint_rows if loop.saving else []
    return Outcome(out.num_steps, out.carry, ys, select(saved_by_loop, saved), rows), operands


def limits_walked(loop: Loop, low: Any, high: Any, num_steps: Any) -> tuple[Any, Any]:
    """The rows that the loop walked."""
    if not loop.predicated:
        return low, high
    return (high - num_steps, high) if loop.reverse else (low, low + num_steps)


def assemble(loop: Loop, parts: PartialEval, known: Outcome, linear: Sequence[Any]) -> Outcome:
    """The loop's results from those of its two parts."""
    unknown = loop.results_from(False, parts.unknown_outputs, False).leaves
    return loop.results(merge_lists(unknown, known.leaves, linear))


def loop_partial_eval(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
    """Run the known part of a loop now. Stage its linear part, which gets what it needs of the known part as operands.

    Operands are `low, high, *consts, *carry, *xs`: xs have `bound` rows, consts and carry have none. Results are those
    of the loop. JAX asks where it evaluates a program on primals and tangents partially (the body of a loop, the rule
    of a `jax.custom_jvp`): primals are known then, tangents are not.

    A leaf of the carry is unknown if, after some number of steps, it depends on an unknown operand (`unknown_outputs`).
    No known leaf then reads an unknown one, so the known leaves make a loop of their own. The linear part reads the
    known carry of each step: from checkpoints, as rows, or as residuals, as the plan says. The whole loop is
    left for later if its number of steps is unknown, if all its results are unknown and nothing happens on the way (a
    loop that returns its carry unchanged may print), or if no operand is.
    """
    loop = Loop(**params)
    low, high, *unknown = (not jaxi.is_known(t) for t in tracers)
    if low or high or not any(unknown):
        return jaxi.leave_for_later(trace, loop_p, tracers, loop._asdict())
    masks = map_leaves(bool, loop.inputs(unknown))
    parts = partial_eval(loop, plan_of(loop, masks, partial_eval), masks)
    nothing_known = all(flatten(parts.unknown_outputs)) and not jaxi.happens(parts.known.body.effects)
    if nothing_known or (loop.predicated and parts.unknown.carry[0]):
        return jaxi.leave_for_later(trace, loop_p, tracers, loop._asdict())
    low, high, *operands = map(jaxi.known_value, tracers)
    known, linear = run_known(loop, parts, low, high, loop.inputs(operands))
    linear = linear._replace(linear=select_each(parts.taken, loop.inputs(tracers[2:])))
    out = jaxi.leave_for_later(trace, linear_loop_p, linear.leaves, parts.linear._asdict())
    return assemble(loop, parts, known, out).leaves


def loop_transpose(cts: Sequence[Any], low: Any, high: Any, *operands: Any, **params: Any) -> list[Any]:
    """Transpose a loop that is linear in some operands, where JAX does not linearise first (`jax.linear_transpose`).

    Operands are `low, high, *consts, *carry, *xs`; undefined primals are linear, the others are values. `cts` are the
    cotangents of `num_steps, *carry, *ys, *saved, checkpoint_rows`. Partial evaluation, with the linear operands as the
    unknown ones, splits the loop into a known and a linear part. The known part runs, and the transpose of the linear
    part is the answer. `low`, `high` and all operands that have values get None.
    """
    loop = Loop(**strip_progress_of_params(params))
    loop = loop._replace(body=filled_in_derivatives(loop.body))
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [None] * (2 + len(operands))
    inputs = loop.inputs(operands)
    unknown = map_leaves(ad.is_undefined_primal, inputs)
    if any(unknown_outputs(loop, unknown).carry[i] for i in loop.stops):
        raise NotImplementedError(
            "jax.linear_transpose of a loop with finite=: a transpose is taken without the numbers that this loop "
            "looks at. Leave finite= out of the loop, or take jax.vjp, which runs it."
        )
    parts = partial_eval(loop, plan_of(loop, unknown, partial_eval), unknown)
    _, given = run_known(loop, parts, low, high, inputs)
    ct = loop.results(cts)
    linear_cts = select_each(parts.unknown_outputs, LoopOutputs(ct.carry, ct.ys))
    avals = map_leaves(type_of_linear, given.linear)
    found = transpose_linear_loop(linear_cts, parts.linear, given, avals)
    # A leaf of the carry that became unknown on the way started with a value, which gets no cotangent.
    cts_of_inputs = fill_each(parts.taken, None, found)
    wanted = map_leaves(lambda ct, is_unknown: ct if is_unknown else None, cts_of_inputs, unknown)
    return [None, None, *flatten(wanted)]


# Linearisation, which JAX asks for in reverse mode: results now, and later their tangents as a linear function.
#
# The loop on pairs of primals and tangents is evaluated partially: tangents are unknown. Its known part runs now.


Linear = Callable[..., list[Any]]  # from the tangents of all operands to those of all results


def loop_linearize(
    nonzero: Sequence[bool], low: Any, high: Any, *operands: Any, **params: Any
) -> tuple[list[Any], list[bool], Linear]:
    """Run the known part of the loop on pairs now; its linear part is the function of tangents.

    Operands are `low, high, *consts, *carry, *xs`: xs have `bound` rows, consts and carry have none. `nonzero` says
    which have a tangent. Results are `num_steps, *carry, *ys, *saved, checkpoint_rows`. A result has a tangent if the
    loop on pairs has one for it after some number of steps.

    The known part computes the results and what the linear part needs. The linear part is linear in
    the tangents, which are all that is unknown of its operands, so JAX can transpose it.
    """
    loop = Loop(**params)
    refuse_effects(loop.body)
    loop = loop._replace(lanes=of_parts(loop.lanes, loop.body, loop.num_consts))  # the pair is evaluated in parts
    inputs, is_nonzero = loop.inputs(operands), map_leaves(bool, loop.inputs(nonzero[2:]))
    pair, perturbed, outputs = jvp_loop(loop, is_nonzero)
    unknown = append_each(map_leaves(lambda _: False, inputs), select_each(perturbed, is_nonzero))
    starts = LoopInputs(*map(tangents_now, perturbed, inputs, is_nonzero))
    known, finish = _run_in_parts(pair, map_leaves(bool, unknown), low, high, append_each(inputs, starts))
    pairs = split_pairs(loop, outputs, known)
    depends = iter([tangent is None for tangent in (*pairs.carry, *pairs.ys, *pairs.saved)])
    results = pairs.results.leaves
    if any(x is None for x in results):
        raise ValueError(
            "reverse mode through a loop whose body calls an operation that has none in JAX. A function of "
            "`jax.custom_batching.custom_vmap` has one in the gradient of a batch, "
            "`jax.grad(lambda x: jax.vmap(f)(x).sum())`, and none in a batch of gradients, `jax.vmap(jax.grad(f))`: "
            "give it a `jax.custom_vjp` there."
        )
    mask = [flag and next(depends) for flag in loop.results_from(False, outputs, False).leaves]

    def linear(*tangents: Any) -> list[Any]:
        dots = LoopInputs(*map(tangents_or_zeros, perturbed, inputs, loop.inputs(tangents[2:])))
        pairs = split_pairs(loop, outputs, finish(append_each(inputs, dots)))
        found = tangents_of_results(loop, outputs, low, pairs)
        return only_marked(mask, results, found)

    return results, mask, linear


def tangents_now(perturbed: Sequence[bool], primals: Sequence[Any], nonzero: Sequence[bool]) -> list[Any]:
    """The tangents of the perturbed operands: types of those that come later, zeros where there is none at first."""
    avals = map(jax.typeof, select(perturbed, primals))
    pairs = zip(avals, select(perturbed, nonzero), strict=True)
    return [ad.UndefinedPrimal(aval) if comes_later else jaxi.zeros(aval) for aval, comes_later in pairs]


def only_marked(mask: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The marked tangents. Others depend on no tangent of an operand, so they are zero."""
    triples = zip(mask, primals, tangents, strict=True)
    return [t if marked else ad.Zero(jax.typeof(x).to_tangent_aval()) for marked, x, t in triples]


def _run_in_parts(
    loop: Loop, unknown: LoopInputs, low: Any, high: Any, inputs: LoopInputs
) -> tuple[Outcome, Callable[[LoopInputs], Outcome]]:
    """The results, None for those that are unknown now, and a function from all inputs to all results."""
    bound = BoundLoop.of(loop, low, high, inputs)
    unknown = bound.masks(unknown)
    plan = plan_of(bound.loop, unknown, partial_eval)
    given, two = bound.inputs(inputs), in_two(bound.loop, plan)
    if two is None:
        known, finish = _run_one(bound.loop, plan, unknown, low, high, given)
    else:
        # The second loop begins where the first ends.
        first, last = two
        start, finish_first = _run_one(first.loop, first.plan, unknown, *first.limits, first.inputs(given))
        pairs = zip(start.carry, bound.loop.output_avals.carry, strict=True)
        given = given._replace(carry=[ad.UndefinedPrimal(aval) if x is None else x for x, aval in pairs])
        unknown = unknown._replace(carry=tuple(x is None for x in start.carry))
        end, finish_last = _run_one(last.loop, last.plan, unknown, *last.limits, last.inputs(given))
        known = joined(bound.loop, start, end)

        def finish_both(inputs: LoopInputs) -> Outcome:
            start = finish_first(first.inputs(inputs))
            return joined(bound.loop, start, finish_last(last.inputs(inputs._replace(carry=start.carry))))

        finish = finish_both

    carry = [None if ad.is_undefined_primal(x) else x for x in inputs.carry]
    return bound.outcome(known, carry), lambda inputs: bound.outcome(finish(bound.inputs(inputs)), inputs.carry)


def _run_one(
    loop: Loop, plan: Plan, unknown: LoopInputs, low: Any, high: Any, inputs: LoopInputs
) -> tuple[Outcome, Callable[[LoopInputs], Outcome]]:
    """`_run_in_parts` of a loop that is bound as it is."""
    parts = partial_eval(loop, plan, unknown)
    known, given = run_known(loop, parts, low, high, inputs)

    def finish(inputs: LoopInputs) -> Outcome:
        operands = given._replace(linear=select_each(parts.taken, inputs))
        linear = linear_loop_p.bind(*operands.leaves, **parts.linear._asdict())
        return assemble(loop, parts, known, linear)

    later = [None] * sum(loop.results_from(False, parts.unknown_outputs, False).leaves)
    return assemble(loop, parts, known, later), finish
