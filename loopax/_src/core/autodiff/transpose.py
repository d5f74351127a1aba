"""Reverse mode: the transpose of the linear part of a loop, whose known part has been run.

It is a loop over the same rows in the other direction. A step of it needs the known carry before that step,
which a reverse sweep recomputes from `saved`. It needs none if the recurrence is linear, or if all that it reads comes
as rows of xs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import and_
from threading import local
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.core.buffer_versions import chained, read_only
from loopax._src.core.finite import any_broken, can_break, is_large
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lane_choice import of_transposed
from loopax._src.core.ir.linear_loop import (
    LinearLoop,
    LinearOperands,
    linear_abstract_eval,
    linear_expected,
    linear_loop_p,
    whole_loop,
)
from loopax._src.core.ir.loop import NO_STOP, Loop, LoopInputs, LoopOutputs, part_of_inverse, run, traversal
from loopax._src.core.ir.reverse_sweep import ReverseSweep, run_sweep
from loopax._src.core.jaxpr.dependence import needed_inputs, step_limits
from loopax._src.core.jaxpr.evaluate import batch_expanded, jvp_expanded
from loopax._src.core.jaxpr.types import batch_if_mapped, trace_carrying
from loopax._src.core.jaxpr.util import (
    Groups,
    Mask,
    flatten,
    invert,
    map_leaves,
    merge_each,
    num_bytes,
    reject_each,
    select,
    select_each,
    split_list,
    trace,
    unflatten,
    weakly_cached,
    written_out,
)
from loopax._src.core.masking import filled_in_transposes
from loopax._src.core.own_arrays import read_in_part
from loopax._src.jax_internals import ClosedJaxpr, Literal, ad, jaxpr_as_fun

_NOT_LOOKED_AT = -2  # in the place of a row in which a cotangent broke

# Leaves of a carry that get no cotangent, such as a sum that nobody reads: the transposed loop does without them.


@weakly_cached
def carry_with_cotangents(linear: LinearLoop, nonzero_carry: Mask, nonzero_ys: Mask) -> Mask:
    """Which leaves of the linear carry get a cotangent after some number of steps, if these results have one."""
    of_linear = iter(nonzero_carry)
    nonzero = [not is_linear or next(of_linear) for is_linear in linear.linear_carry]
    start = 1 + len(linear.linear_consts)
    used = needed_inputs(linear.body, range(start, start + len(nonzero)), [*nonzero, *nonzero_ys])
    return tuple(select_each(linear.masks, linear.inputs(used[1:])).carry)


@weakly_cached
def without_others(linear: LinearLoop, kept: Mask) -> LinearLoop:
    """The loop without those leaves of the linear carry that get no cotangent; zeros stand for them in the body."""
    of_linear, avals = iter(kept), linear.input_avals
    keep = map_leaves(lambda _: True, avals)
    keep = keep._replace(carry=tuple(not is_linear or next(of_linear) for is_linear in linear.linear_carry))
    kept_avals, others = select_each(keep, avals), reject_each(keep, avals)

    def with_zeros(body: ClosedJaxpr) -> ClosedJaxpr:
        function = jaxpr_as_fun(body)

        # Before: (row, *consts, *carry, *x) -> (*carry, *y). After: the same with the kept leaves of the carry alone.
        def slim(row: Any, *operands: Any) -> list[Any]:
            inputs = merge_each(keep, map_leaves(jaxi.zeros, others), unflatten(kept_avals, operands))
            out = linear.outputs(function(row, *flatten(inputs)))
            return flatten(select_each(LoopOutputs(keep.carry, [True] * len(out.ys)), out))

        closed = trace(slim, [body.in_avals[0], *flatten(kept_avals)])
        return jaxi.dce(closed, [True] * len(closed.out_avals), True)[0]

    return linear._replace(
        body=with_zeros(linear.body),
        linear_carry=tuple(select_each(keep, linear.masks).carry),
        saved=linear.saved and tuple(select(kept, linear.saved)),
        inverse=linear.inverse and with_zeros(linear.inverse),
    )


@weakly_cached
def known_recurrence(linear: LinearLoop) -> ClosedJaxpr:
    """The known part of the carry: (row, *known consts, *known carry, *known x) -> known carry."""
    wanted = [*invert(linear.linear_carry), *(False for _ in linear.output_avals.ys)]
    return jaxi.dce(linear.body, wanted, [True, *invert(flatten(linear.masks))])[0]


class _StepInputs(NamedTuple):
    """What stands for each input of a transposed step behind the row."""

    known_consts: Sequence[Any]
    ct_carry: Sequence[Any]
    ct_consts: Sequence[Any]
    known_carry: Sequence[Any]
    known_xs: Sequence[Any]
    ct_ys: Sequence[Any]


class _LinearOutputs(NamedTuple):
    """What stands for the outputs of a step that are transposed."""

    carry: Sequence[Any]
    ys: Sequence[Any]
    last_consts: Sequence[Any]  # the last versions of the consts (`core/buffer_versions.py`)


@weakly_cached
def transposed_step(linear: LinearLoop, nonzero_ys: Mask) -> ClosedJaxpr:
    """One step backward, with cotangents for those ys that have any (`nonzero_ys`), and the known carry behind it.

    (row, *known consts, *ct carry, *ct consts, *known carry, *known x, *ct y)
    -> (*ct carry, *ct consts, *known carry, *ct x)

    For a linear step `c' = A c + B k + D x, y = E c` this is `ct c = A^T ct c' + E^T ct y`, `ct k += B^T ct c'` and `ct
    x = D^T ct c'`. All steps read a constant k, so its cotangents are summed in the carry. One step reads a row of xs,
    so the row's cotangent is a row of ys of the transposed loop, and nothing is added. If steps only read rows of a
    constant (a buffer), the transposed step adds to these rows of its cotangent alone, in place.

    JAX evaluates the linear part partially before it transposes it. What is known is computed then, once for the
    derivative and for the known carry behind the step.
    """
    function = chained(linear.body)
    read = read_only(linear.body, range(1, 1 + len(linear.linear_consts)))
    by_row = select(linear.linear_consts, read)
    wanted = _LinearOutputs(linear.linear_carry, nonzero_ys, tuple(map(and_, linear.linear_consts, read)))
    known, cts = (each(linear.masks, linear.input_avals) for each in (reject_each, select_each))
    ct_ys = select(nonzero_ys, linear.output_avals.ys)
    avals = _StepInputs(known.consts, cts.carry, cts.consts, known.carry, known.xs, ct_ys)

    def step(row: Any, *operands: Any) -> list[Any]:
        given = unflatten(avals, operands)
        known = LoopInputs(given.known_consts, given.known_carry, given.known_xs)
        known_carry: list[Any] = []

        def linear_part(linear_inputs: LoopInputs) -> _LinearOutputs:
            out, last = function(row, *flatten(merge_each(linear.masks, known, linear_inputs)))
            outputs = linear.outputs(out)
            known_carry[:] = map(jaxi.known_now, reject_each(linear.linear_outputs, outputs).carry)
            return select_each(wanted, _LinearOutputs(*outputs, linear.inputs(last[1:]).consts))

        (found,) = jaxi.linear_transpose(linear_part, map_leaves(jaxi.strong, cts))(
            _LinearOutputs(given.ct_carry, given.ct_ys, select(by_row, given.ct_consts))
        )
        if any(x is None for x in known_carry):  # an equation is evaluated later as a whole
            known_carry = jaxpr_as_fun(known_recurrence(linear))(row, *flatten(known))
        sums = zip(by_row, given.ct_consts, found.consts, strict=True)
        ct_consts = [new if is_sum else jaxi.added(old, new) for is_sum, old, new in sums]
        return [*found.carry, *ct_consts, *known_carry, *found.xs]

    with of_a_step():
        return filled_in_transposes(trace(step, [linear.body.in_avals[0], *flatten(avals)]))


# Which step it was whose derivative made a cotangent that is not finite, where somebody looks (`Loop.watch`).

_inside = local()  # of a step that is transposed: the loop around looks


@contextmanager
def of_a_step() -> Iterator[None]:
    """What is transposed here is a part of a step: loops in it do not look at their cotangents."""
    before, _inside.step = getattr(_inside, "step", False), True
    try:
        yield
    finally:
        _inside.step = before


@weakly_cached
def watched_step(linear: LinearLoop, step: ClosedJaxpr) -> ClosedJaxpr:
    """A transposed step with one more leaf behind the cotangents: the first row in which one broke, or `NO_STOP[0]`.

    Of a large cotangent to which a step adds something, what is added is looked at, or what this is a product of. Not
    looked at is one to which a step adds in place. Both are at the end: there, the step is not known.
    """
    num_known = linear.linear_consts.count(False)
    read = read_only(linear.body, range(1, 1 + len(linear.linear_consts)))
    num_cts = sum(linear.linear_carry) + sum(linear.linear_consts)
    skipped = [sum(linear.linear_carry) + k for k, by_row in enumerate(select(linear.linear_consts, read)) if by_row]
    num_state, given, results = linear.linear_carry.count(False), step.invars[1 + num_known :], step.outvars
    new = [k for k in range(len(results)) if not num_cts <= k < num_cts + num_state and k not in skipped]
    is_sum = [num_cts - sum(linear.linear_consts) <= k < num_cts for k in range(len(results))]
    seen = [x for k in new for x in (_added_to(step, given[k], results[k]) if is_sum[k] else [results[k]])]
    function = jaxpr_as_fun(jaxi.replace_jaxpr(step, step.invars, [*results, *seen]))

    def watched(row: Any, *operands: Any) -> list[Any]:
        cts, (found,), consts, rest = split_list(operands, [num_cts, 1, num_known])
        out, seen = split_list(function(row, *consts, *cts, *rest), [len(results)])
        breaks = any_of_broken(seen)
        found = jnp.where(breaks & (found == NO_STOP[0]), row, found)
        return [*out[:num_cts], found, *out[num_cts:]]

    row, *avals = step.in_avals
    consts, cts, rest = split_list(avals, [num_known, num_cts])
    closed = trace_carrying(watched, row, [*cts, row], [*consts, *rest])
    # Before: (row, *cts, found, *consts, *rest) -> After: (row, *consts, *cts, found, *rest)
    given, cts, consts, rest = split_list(closed.invars, [1, num_cts + 1, num_known])
    return jaxi.replace_jaxpr(closed, [*given, *consts, *cts, *rest], closed.outvars)


def _added_to(step: ClosedJaxpr, old: Any, new: Any) -> list[Any]:
    """Smaller values of the step that are not finite where a sum is not that was `old` before; or the sum.

    A product of them may overflow: then the step is not known.
    """
    made = {out: eqn for eqn in step.eqns for out in eqn.outvars}
    todo, found, size = [new], [], new.aval.size
    while todo and is_large(new.aval):
        atom = todo.pop()
        eqn = None if isinstance(atom, Literal) else made.get(atom)
        if atom is old or isinstance(atom, Literal):
            continue
        if atom.aval.size >= size and eqn is not None and jaxi.keeps_finite(eqn):
            todo += eqn.invars
        else:
            found.append(atom)
    return found if found and sum(x.aval.size for x in found) < size else [new]


def any_of_broken(arrays: Sequence[Any]) -> Any:
    """Whether one of these has an element that is not finite: bool[]."""
    flags = [any_broken(x) for x in arrays if can_break(jax.typeof(x))]
    return jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), bool)


def transpose_linear_loop(
    cts: LoopOutputs, linear: LinearLoop, given: LinearOperands, avals: LoopInputs, begun: Sequence[Any] | None = None
) -> LoopInputs:
    """Cotangents of the linear inputs, whose types are `avals`, from those of the linear carry and of ys.

    Those of consts begin with `begun`, or with zeros.
    """
    if error := linear.plan.error:
        raise error
    nonzero_carry, nonzero_ys = map_leaves(lambda ct: not isinstance(ct, ad.Zero), cts)
    kept = carry_with_cotangents(linear, nonzero_carry, nonzero_ys)
    if not all(kept):
        keep = map_leaves(lambda _: True, avals)._replace(carry=kept)  # of the linear inputs
        cts = select_each(LoopOutputs(kept, [True] * len(cts.ys)), cts)
        found = transpose_linear_loop(cts, without_others(linear, kept), given, select_each(keep, avals), begun)
        return merge_each(keep, map_leaves(ad.Zero, reject_each(keep, avals)), found)
    step = transposed_step(linear, nonzero_ys)
    start = [*map(written_out, cts.carry), *(begun or map(jaxi.zeros, avals.consts))]
    num_carry, watch = len(cts.carry), None if getattr(_inside, "step", False) else linear.watch
    if watch:
        step = watched_step(linear, step)
        found = step.out_avals[len(start)]
        # What is not finite at the start is nobody's fault here.
        nothing = any_of_broken([*start, *select(nonzero_ys, cts.ys)])
        start.append(jaxi.vary_like(jnp.where(nothing, _NOT_LOOKED_AT, NO_STOP[0]).astype(jnp.int32), found))
    linear = linear._replace(lanes=of_transposed(linear.lanes, num_bytes(avals.consts)))
    known, low, high = given.known, given.low, given.high
    xs = [*known.xs, *select(nonzero_ys, cts.ys)]
    if known.carry:
        # A reverse sweep recomputes the known carry before each step.
        (rows,) = given.checkpoint_rows
        sweep = sweep_of(linear, step)._replace(num_carry=len(start))
        carry, ct_xs = run_sweep(sweep, low, high, rows, known.consts, known.carry, given.saved, start, xs)
    else:
        # The steps need no known carry, or read it from rows of xs: a loop over the rows in the other direction.
        sizes = {"num_consts": len(known.consts), "num_carry": len(start)}
        loop = Loop(step, predicated=False, kind=Decided(linear.plan), **sizes, **traversal(linear))
        out = run(loop._replace(reverse=not linear.reverse), low, high, known.consts, start, xs)
        carry, ct_xs = out.carry, out.ys
    carry, consts, rows = split_list(carry, [num_carry, len(avals.consts)])
    found = LoopInputs(consts=consts, carry=carry, xs=ct_xs)
    for row in rows:
        broke = (row >= 0) | ((row == NO_STOP[0]) & any_of_broken(consts))
        step_number = jnp.where(row < 0, row, high - 1 - row if linear.reverse else row - low)
        found = LoopInputs(*linear.watch(tuple(found), broke, step_number))
    return found


def sweep_of(linear: LinearLoop, step: ClosedJaxpr) -> ReverseSweep:
    """The reverse sweep that takes these transposed steps."""
    assert linear.saving is not None
    consts, carry, xs = (mask.count(False) for mask in linear.masks)
    return ReverseSweep(
        step,
        num_consts=consts,
        num_state=carry,
        num_carry=sum(linear.linear_carry) + sum(linear.linear_consts),
        num_forward_xs=xs,
        plan=linear.plan,
        saving=linear.saving,
        inverse=part_of_inverse(linear.inverse, invert(flatten(linear.masks)), invert(linear.linear_carry)),
        **traversal(linear),
    )


def _transpose(
    cts: Sequence[Any], *flat: Any, begun: Mapping[int, Any] = MappingProxyType({}), **params: Any
) -> list[Any]:
    """Run the loop backward: cotangents of the linear inputs from those of the linear carry and of the ys.

    Operands are `low, high, *known consts, *known init, *saved, checkpoint_rows, *known xs, *linear consts, *linear
    init, *linear xs`. All before the linear ones are values and get None. The linear ones are undefined primals: the
    rule uses only their types. `cts` are the cotangents of the linear carry, of ys (`bound` rows each) and of the saved
    linear carries, in this order. The rule drops the last: derivatives reach checkpoints through the start of the
    carry.

    Each step is transposed alone (`transposed_step`), and the transposed steps are taken from the last row to the
    first: the transpose of a product is the product of the transposes in the other order.
    """
    linear = LinearLoop(**params)
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [None] * len(flat)
    given = LinearOperands.of(linear, flat)
    avals = map_leaves(type_of_linear, given.linear)
    # Checkpoints get no real cotangent: their only consumer, a reverse sweep, routes derivatives through the start of
    # the carry. An outer loop may have instantiated the symbolic zeros, so they are dropped, not asserted.
    num_saved = len(cts) - sum(map(len, linear.output_avals))
    linear_cts = unflatten(linear.output_avals, cts[: len(cts) - num_saved])
    numbers = LinearOperands.of(linear, range(len(flat))).linear.consts
    found = transpose_linear_loop(linear_cts, linear, given, avals, starts_of_sums(begun, numbers, avals.consts))
    return cotangents_of_linear(flat, given.linear, found)


def starts_of_sums(begun: Mapping[int, Any], numbers: Sequence[int], avals: Sequence[Any]) -> list[Any]:
    """What is added to: the cotangents of these operands that have begun, or zeros."""
    return [begun[i] if i in begun else jaxi.zeros(aval) for i, aval in zip(numbers, avals, strict=True)]


def consts_in_part(step: ClosedJaxpr, is_linear: Mask, numbers: Sequence[int]) -> list[int]:
    """Of the operands that are linear consts, those of which a step (row, *consts, ...) reads a part alone."""
    return select(select(is_linear, read_in_part(step)[1 : 1 + len(is_linear)]), numbers)


def _adds_in_place(*operands: Any, **params: Any) -> list[int]:
    linear = LinearLoop(**params)
    numbers = LinearOperands.of(linear, range(len(operands))).linear.consts
    return consts_in_part(linear.body, linear.linear_consts, numbers)


def cotangents_of_linear(flat: Sequence[Any], linear: Groups, cts: Groups) -> list[Any]:
    """The answer of a transpose rule whose last operands are the linear ones: None for those that have a value."""
    pairs = zip(flatten(cts), flatten(linear), strict=True)
    wanted = [ct if ad.is_undefined_primal(x) else None for ct, x in pairs]
    return [None] * (len(flat) - len(wanted)) + wanted


def type_of_linear(x: Any) -> Any:
    """The type of an operand in which something is transposed, or of one that JAX gives as a value."""
    return x.aval if ad.is_undefined_primal(x) else jax.typeof(x)


jaxi.register(
    linear_loop_p,
    meaning=whole_loop,
    params=LinearLoop._fields,
    abstract_eval=linear_abstract_eval,
    expected=linear_expected,
    jvp=jvp_expanded(whole_loop),
    transpose=_transpose,
    adds_in_place=_adds_in_place,
    batch=batch_if_mapped(linear_loop_p, batch_expanded(whole_loop)),
)
step_limits[linear_loop_p] = lambda eqn: (LinearLoop(**eqn.params).bound, False)
