"""Divide a loop by what is known of its operands: a known loop, and the linear rest of it.

How the known loop hands over what the rest needs of its carry is the loop's `storage`: the states before
some steps, the state before every step, or the residuals of every step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from loopax._src.core.autodiff.transpose import LinearLoop
from loopax._src.core.effects.guard import without_effects
from loopax._src.core.ir.kind import Checkpoints, EveryResidual, Nothing, saving_for
from loopax._src.core.ir.loop import Loop
from loopax._src.core.jaxpr.dataflow import dependence, dependence_fixpoint, members
from loopax._src.core.jaxpr.util import (
    Mask,
    either,
    invert,
    merge_lists,
    num_bytes,
    reject,
    select,
    split_list,
    trace,
    weakly_cached,
)
from loopax._src.core.row_buffers.versions import buffers, frozen_body
from loopax._src.jax_internals import ClosedJaxpr, dce, jaxpr_as_fun, partial_eval_jaxpr, replace_jaxpr
from loopax._src.schedule.saving import Saving


class PartialEval(NamedTuple):
    """A loop in two parts."""

    known: Loop  # takes all known operands; its last ys may be residuals
    linear: LinearLoop
    unknown_carry: Mask
    unknown_ys: Mask
    uses: tuple[Mask, Mask, Mask]  # which consts, carry leaves and xs of the loop the rest uses
    last: Mask = ()  # of which known leaves of the carry the rest is given the last version (`row_buffers/versions.py`)
    hoisted: ClosedJaxpr | None = None  # known consts -> residuals that are the same at every step

    @property
    def num_known_ys(self) -> int:
        """Rows of ys of the known loop that are the original loop's, not residuals."""
        return self.unknown_ys.count(False)

    @property
    def states(self) -> Mask:
        """Which known leaves of the carry the rest uses."""
        return tuple(reject(self.unknown_carry, self.uses[1]))


@weakly_cached
def partial_eval(loop: Loop, unknown: Mask) -> PartialEval:
    """Divide a loop; `unknown` marks consts, carry and xs."""
    if isinstance(loop.storage, EveryResidual):
        return _keep_residuals(loop, unknown)
    consts, _, xs = (tuple(m) for m in split_list(unknown, loop.sizes))
    carry, ys = unknown_outputs(loop, unknown)
    known = known_loop(loop, consts, carry, xs, ys)
    pure = without_effects(loop.body)
    body, uses = prune(pure, loop.sizes, carry, ys)
    appended = buffers(loop.body, loop.carry_range, True)
    last = tuple(map(all, zip(appended, uses[1], invert(carry), invert(loop.saved_mask), strict=True)))
    if any(last):
        body = frozen_body(body, [sum(uses[0]), sum(uses[1])], tuple(select(uses[1], last)))
        uses = uses[0], tuple(used and not is_last for used, is_last in zip(uses[1], last, strict=True)), uses[2]
    linear_consts, linear_carry, linear_xs = map(tuple, map(select, uses, (consts, carry, xs)))
    linear = LinearLoop(
        body,
        (*linear_consts, *(False,) * sum(last)),
        linear_carry,
        linear_xs,
        bound=loop.bound,
        reverse=loop.reverse,
        unroll=loop.unroll,
        storage=loop.storage,
        saving=loop.saving,
        saved=tuple(select(carry, loop.saved_mask)) if loop.saving else (),
        stages=loop.stages,
    )
    parts = PartialEval(known, linear, carry, ys, uses, last)
    if isinstance(loop.storage, Nothing) or not any(parts.states):
        return parts
    if isinstance(loop.storage, Checkpoints):
        states = select(parts.states, known.output_avals[0])
        saving = loop.saving or saving_for(loop.storage, loop.bound, num_bytes(states), not loop.predicated)
        if saving:
            return _keep_some_carries(parts, saving)
    return _keep_every_carry(parts)


def unknown_outputs(loop: Loop, unknown: Mask) -> tuple[Mask, Mask]:
    """Which leaves of the carry and which ys are unknown."""
    flags = dependence_fixpoint(without_effects(loop.body), (False, *unknown), loop.carry_range)
    carry, ys = split_list(flags, [loop.num_carry])
    return tuple(carry), tuple(ys)


def known_loop(loop: Loop, consts: Mask, carry: Mask, xs: Mask, ys: Mask) -> Loop:
    """The part of the loop that depends on nothing unknown; it takes all known operands."""
    reporting = loop.reporting
    if loop.active_count_index is not None and carry[loop.active_count_index]:
        reporting = reporting and reporting._replace(counts_lanes=False)
    names = loop.names.keep(*map(invert, (consts, carry, xs, ys)))
    return loop._replace(
        debug_info=loop.debug_info and loop.debug_info.renamed(names),
        reporting=reporting,
        body=_known_body(
            loop.body, [True, *invert(consts), *invert(carry), *invert(xs)], [*invert(carry), *invert(ys)]
        ),
        num_consts=consts.count(False),
        num_carry=carry.count(False),
        saved=tuple(reject(carry, loop.saved)) if loop.saved else (),
    )


def _known_body(body: ClosedJaxpr, inputs: Sequence[bool], outputs: Sequence[bool]) -> ClosedJaxpr:
    """What known inputs give, and the effects, which depend on nothing else."""
    known, used = dce(body, outputs, inputs)
    if used == inputs:
        return known
    # An effect inside an equation with unknown operands (a `cond`, an inner loop), which JAX can divide.
    known, _, _ = partial_eval_jaxpr(body, invert(inputs), invert(outputs))
    residuals = len(known.out_avals) - sum(outputs)
    return dce(known, [True] * sum(outputs) + [False] * residuals, True)[0]


def prune(
    body: ClosedJaxpr, sizes: Sequence[int], carry: Mask, ys: Mask
) -> tuple[ClosedJaxpr, tuple[Mask, Mask, Mask]]:
    """Keep what these outputs of any number of steps need, and say which inputs that is."""
    num_consts, num_carry = sizes
    while True:
        keep = [True, *(False,) * num_consts, *carry]
        keep += [False] * (len(body.in_avals) - len(keep))
        pruned, used = dce(body, [*carry, *ys], keep)
        _, consts, needed, xs = split_list(used, [1, num_consts, num_carry])
        if tuple(needed) == carry:
            return pruned, (tuple(consts), carry, tuple(xs))
        carry = either(carry, needed)


def _keep_some_carries(parts: PartialEval, saving: Saving) -> PartialEval:
    """The known loop saves the states that the rest needs, with those it saves already."""
    known = parts.known
    saved = either(known.saved_mask, parts.states)
    return parts._replace(known=known._replace(saving=saving, saved=saved), linear=parts.linear._replace(saving=saving))


def _keep_every_carry(parts: PartialEval) -> PartialEval:
    """The known loop writes the states that the rest needs as rows; the rest reads them as such."""
    known, linear = parts.known, parts.linear
    inputs, outputs = known.body.jaxpr.invars, known.body.jaxpr.outvars
    states = select(parts.states, [inputs[i] for i in known.carry_range])
    known = known._replace(body=replace_jaxpr(known.body, inputs, [*outputs, *states]))

    jaxpr = linear.body.jaxpr
    row, consts, carry, xs = split_list(jaxpr.invars, [1, len(linear.linear_consts), len(linear.linear_carry)])
    new_carry, ys = split_list(jaxpr.outvars, [len(linear.linear_carry)])
    body = replace_jaxpr(
        linear.body,
        [*row, *consts, *select(linear.linear_carry, carry), *xs, *reject(linear.linear_carry, carry)],
        [*select(linear.linear_carry, new_carry), *ys],
    )
    linear = linear._replace(
        body=dce(body, [True] * len(body.out_avals), True)[0],
        linear_carry=(True,) * sum(linear.linear_carry),
        linear_xs=(*linear.linear_xs, *(False,) * len(states)),
    )
    return parts._replace(known=known, linear=linear)


class _Residual(NamedTuple):
    """Where the rest finds a residual."""

    hoisted: bool  # the same at every step
    forwarded: int | None  # a row of this known x as it is
    position: int  # among the outputs of the known body


def _keep_residuals(loop: Loop, unknown: Mask) -> PartialEval:
    """Let JAX divide the body; residuals become constants, rows of xs, or new rows of ys."""
    consts, _, xs = (tuple(m) for m in split_list(unknown, loop.sizes))
    known, later, carry, ys = _partial_eval_body(loop, unknown)
    num_outputs = carry.count(False) + ys.count(False)
    sizes = [consts.count(False), carry.count(False), xs.count(False)]
    residuals = _classified(known, sizes, range(num_outputs, len(known.out_avals)))
    rows = [r.position for r in residuals if not r.hoisted and r.forwarded is None]
    loop_body = replace_jaxpr(known, known.jaxpr.invars, [known.jaxpr.outvars[p] for p in (*range(num_outputs), *rows)])
    x_used = tuple(any(r.forwarded == i for r in residuals) for i in range(sizes[2]))
    linear = LinearLoop(
        _linear_body(loop, later, residuals, (consts, carry, xs)),
        linear_consts=(False,) * sum(r.hoisted for r in residuals) + (True,) * sum(consts),
        linear_carry=(True,) * sum(carry),
        linear_xs=(False,) * (sum(x_used) + len(rows)) + (True,) * sum(xs),
        bound=loop.bound,
        reverse=loop.reverse,
        unroll=loop.unroll,
        storage=loop.storage,
        stages=loop.stages,
    )
    return PartialEval(
        loop._replace(
            debug_info=loop.debug_info
            and loop.debug_info.renamed(loop.names.keep(*map(invert, (consts, carry, xs, ys)))),
            body=dce(loop_body, [True] * len(loop_body.out_avals), True)[0],
            num_consts=sizes[0],
            num_carry=sizes[1],
        ),
        linear,
        carry,
        ys,
        uses=(consts, carry, tuple(merge_lists(xs, x_used, (True,) * sum(xs)))),
        last=(False,) * loop.num_carry,
        hoisted=_hoisted(known, sizes, [r.position for r in residuals if r.hoisted]),
    )


def _partial_eval_body(loop: Loop, unknown: Mask) -> tuple[ClosedJaxpr, ClosedJaxpr, Mask, Mask]:
    """JAX's partial evaluation of the body, at the fixed point of what is unknown of the carry."""
    consts, _, xs = split_list(unknown, loop.sizes)
    carry, ys = unknown_outputs(loop, unknown)
    while True:
        inputs = [False, *consts, *carry, *xs]
        known, later, out = partial_eval_jaxpr(loop.body, inputs, [*carry, *ys])
        carry_out, ys_out = split_list(out, [loop.num_carry])
        if either(carry, carry_out) == carry:
            return known, without_effects(later), carry, tuple(ys_out)
        carry = either(carry, carry_out)


def _classified(known: ClosedJaxpr, sizes: Sequence[int], positions: Sequence[int]) -> list[_Residual]:
    num_consts, num_carry, num_xs = sizes
    consts, first_x = range(1, 1 + num_consts), 1 + num_consts + num_carry
    inputs = known.jaxpr.invars[first_x : first_x + num_xs]
    candidates = [p for p in positions if all(i in consts for i in members(dependence(known)[p]))]
    hoisted = _computed_from(known, consts, candidates)

    def classify(position: int) -> _Residual:
        same = [i for i, variable in enumerate(inputs) if variable is known.jaxpr.outvars[position]]
        return _Residual(position in hoisted, None if position in hoisted or not same else same[0], position)

    return list(map(classify, positions))


def _computed_from(known: ClosedJaxpr, inputs: range, positions: list[int]) -> list[int]:
    """The outputs that can be computed from these inputs: an equation that they stand in may be all or nothing."""

    def suffice(positions: list[int]) -> bool:
        used = dce(known, [p in positions for p in range(len(known.out_avals))], False)[1]
        return all(i in inputs for i, needed in enumerate(used) if needed)

    return positions if suffice(positions) else [p for p in positions if suffice([p])]


def _hoisted(known: ClosedJaxpr, sizes: Sequence[int], positions: Sequence[int]) -> ClosedJaxpr | None:
    """Known consts -> residuals that depend on nothing else."""
    if not positions:
        return None
    wanted = [p in positions for p in range(len(known.out_avals))]
    is_const = [0 < i <= sizes[0] for i in range(len(known.in_avals))]
    return dce(without_effects(known), wanted, is_const)[0]


def _linear_body(
    loop: Loop, later: ClosedJaxpr, residuals: Sequence[_Residual], unknown: tuple[Mask, Mask, Mask]
) -> ClosedJaxpr:
    """(row, *hoisted, *consts, *carry, *forwarded x, *residual rows, *x) -> (*carry, *y)."""
    function = jaxpr_as_fun(later)
    avals = later.in_avals[: len(residuals)]
    forwarded = sorted({r.forwarded for r in residuals if r.forwarded is not None})
    first_of = {f: next(a for r, a in zip(residuals, avals, strict=True) if r.forwarded == f) for f in forwarded}
    consts, carry, xs, _ = split_list(later.in_avals[len(residuals) :], [sum(mask) for mask in unknown])
    groups = [
        [a for r, a in zip(residuals, avals, strict=True) if r.hoisted],
        consts,
        carry,
        [first_of[f] for f in forwarded],
        [a for r, a in zip(residuals, avals, strict=True) if not r.hoisted and r.forwarded is None],
        xs,
    ]

    def body(_: Any, *operands: Any) -> list[Any]:
        hoisted, consts, carry, rows, stacked, xs, _ = split_list(operands, [len(group) for group in groups])
        hoisted_values, stacked_values = iter(hoisted), iter(stacked)
        values = [
            next(hoisted_values)
            if r.hoisted
            else next(stacked_values)
            if r.forwarded is None
            else rows[forwarded.index(r.forwarded)]
            for r in residuals
        ]
        return function(*values, *consts, *carry, *xs)

    return trace(body, [loop.body.in_avals[0], *(aval for group in groups for aval in group)])
