"""The linear part of a loop whose known part has been run: what reverse mode transposes.

Operands are `low, high, *known consts, *known init, *saved, checkpoint_rows, *known xs, *linear consts, *linear init,
*linear xs`. Results are the linear leaves of the carry, the ys (all are linear) and the saved linear carries. Run as it
stands (by `jax.linearize`), the linear part evaluates the whole loop, known part included.

Its transpose is a loop over the same rows in the other direction. A step of it needs the known carry before that step,
which a reverse sweep recomputes from `saved`. It needs none if the recurrence is linear, or if all that it reads comes
as rows of xs.
"""

from collections.abc import Sequence
from operator import and_
from typing import Any, NamedTuple

import jax

from loopax._src.core.ir.inverse import part_of_inverse
from loopax._src.core.ir.lane_stages import Stages
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, result_avals, run, traversal
from loopax._src.core.ir.plan import Plan, Storage
from loopax._src.core.ir.reverse_sweep import ReverseSweep, run_sweep
from loopax._src.core.ir.typecheck import check_checkpoints, check_count, check_loop
from loopax._src.core.jaxpr.cost import step_limits
from loopax._src.core.jaxpr.expand import batch_expanded, jvp_expanded, linearize_expanded
from loopax._src.core.jaxpr.operand_groups import (
    Groups,
    flatten,
    map_leaves,
    merge_each,
    reject_each,
    select_each,
    unflatten,
)
from loopax._src.core.jaxpr.util import (
    Mask,
    either,
    invert,
    merge_lists,
    reject,
    select,
    split_list,
    trace,
    weakly_cached,
    written_out,
)
from loopax._src.core.row_buffers.versions import chained, read_only
from loopax._src.jax_internals import (
    ClosedJaxpr,
    ad,
    dce,
    jaxpr_as_fun,
    known_now,
    new_primitive,
    register,
    strong,
    zeros,
)
from loopax._src.schedule.saving import Saving


class LinearLoop(NamedTuple):
    """The static description of the linear part of a loop."""

    body: ClosedJaxpr  # (row, *consts, *carry, *x) -> (*carry, *y), known and linear leaves mixed
    linear_consts: Mask
    linear_carry: Mask
    linear_xs: Mask
    bound: int | None
    reverse: bool
    unroll: int
    storage: Storage
    saving: Saving | None = None
    saved: Mask = ()  # which linear leaves of the carry are saved, if the loop itself saves
    stages: Stages | None = None  # as in `Loop`
    inverse: ClosedJaxpr | None = None  # of the whole loop, as in `Loop`

    @property
    def plan(self) -> Plan:
        """What the known loop stores: its kind has been asked."""
        assert isinstance(self.storage, Plan)
        return self.storage

    @property
    def masks(self) -> LoopInputs:
        """Which consts, carry leaves and xs are linear."""
        return LoopInputs(self.linear_consts, self.linear_carry, self.linear_xs)

    @property
    def known_sizes(self) -> list[int]:
        """Lengths of known consts, known init, saved, checkpoint_rows and known xs among the operands."""
        consts, carry, xs = (mask.count(False) for mask in self.masks)
        recomputes = carry > 0 and self.saving is not None
        return [consts, carry, carry if recomputes else 0, int(recomputes), xs]

    @property
    def linear_sizes(self) -> list[int]:
        """Lengths of linear consts, init and xs."""
        return [sum(mask) for mask in self.masks]

    def inputs(self, leaves: Sequence[Any]) -> LoopInputs:
        """By name what stands for each input of the body behind the row."""
        return LoopInputs(*split_list(leaves, [len(self.linear_consts), len(self.linear_carry)]))

    def outputs(self, leaves: Sequence[Any]) -> LoopOutputs:
        """By name what stands for each output of the body."""
        return LoopOutputs(*split_list(leaves, [len(self.linear_carry)]))

    @property
    def input_avals(self) -> LoopInputs:
        """The types of consts, carry and rows of xs."""
        return self.inputs(self.body.in_avals[1:])

    @property
    def output_avals(self) -> LoopOutputs:
        """The types of the linear carry and of rows of ys, which are all linear."""
        carry, ys = self.outputs(self.body.out_avals)
        return LoopOutputs(select(self.linear_carry, carry), ys)

    @property
    def as_loop(self) -> Loop:
        """The whole loop, known part included."""
        of_linear = iter(self.saved)
        return Loop(
            self.body,
            num_consts=len(self.linear_consts),
            num_carry=len(self.linear_carry),
            predicated=False,
            inverse=self.inverse,
            saving=self.saving if any(self.saved) else None,
            saved=tuple(linear and next(of_linear) for linear in self.linear_carry) if any(self.saved) else (),
            **traversal(self),
        )


class LinearOperands(NamedTuple):
    """The operands of a linear loop by name."""

    low: Any
    high: Any
    known: LoopInputs
    saved: list[Any]  # known carries before some steps, where others are recomputed from these
    checkpoint_rows: list[Any]  # one array: before which steps; none where nothing is recomputed
    linear: LoopInputs

    @classmethod
    def of(cls, linear: LinearLoop, operands: Sequence[Any]) -> "LinearOperands":
        """From the flat list."""
        low, high, *rest = operands
        known, carry, saved, rows, known_xs, *groups, _ = split_list(rest, [*linear.known_sizes, *linear.linear_sizes])
        return cls(low, high, LoopInputs(known, carry, known_xs), saved, rows, LoopInputs(*groups))

    @property
    def leaves(self) -> list[Any]:
        """The flat list."""
        consts, carry, xs = self.known
        window = [self.low, self.high]
        return [*window, *consts, *carry, *self.saved, *self.checkpoint_rows, *xs, *flatten(self.linear)]


linear_loop_p = new_primitive("linear_loop")


def _whole(*flat: Any, **params: Any) -> list[Any]:
    """The whole loop, known part included; returns what is linear of its results."""
    linear = LinearLoop(**params)
    given = LinearOperands.of(linear, flat)
    out = run(linear.as_loop, given.low, given.high, *merge_each(linear.masks, given.known, given.linear))
    return [*select(linear.linear_carry, out.carry), *out.ys, *out.saved]


def _abstract(*_: Any, **params: Any) -> list[Any]:
    """The types of the linear carry, of the ys and of the saved linear carries."""
    linear = LinearLoop(**params)
    types = result_avals(linear.as_loop)
    return [*linear.output_avals.carry, *types.ys, *types.saved]


def _typecheck(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of the results, if the operands fit the whole loop, and `saved` fits its known part."""
    linear = LinearLoop(**params)
    check_count("linear_loop", 2 + sum(linear.known_sizes) + sum(linear.linear_sizes), avals)
    given = LinearOperands.of(linear, avals)
    inputs = merge_each(linear.masks, given.known, given.linear)
    check_loop("linear_loop", linear.as_loop, [given.low, given.high], inputs)
    if given.checkpoint_rows and linear.saving:
        (numbers,), states = given.checkpoint_rows, reject_each(linear.masks, linear.input_avals).carry
        check_checkpoints("linear_loop", states, given.saved, numbers, linear.saving, linear.bound)
    return _abstract(*avals, **params), frozenset()


@weakly_cached
def known_recurrence(linear: LinearLoop) -> ClosedJaxpr:
    """The known part of the carry: (row, *known consts, *known carry, *known x) -> known carry."""
    wanted = [*invert(linear.linear_carry), *(False for _ in linear.output_avals.ys)]
    return dce(linear.body, wanted, [True, *invert(flatten(linear.masks))])[0]


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
    last_consts: Sequence[Any]  # the last versions of the consts (`row_buffers/versions.py`)


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
            known_carry[:] = map(known_now, reject(linear.linear_carry, linear.outputs(out).carry))
            return select_each(wanted, _LinearOutputs(*linear.outputs(out), linear.inputs(last[1:]).consts))

        (found,) = jax.linear_transpose(linear_part, map_leaves(strong, cts))(
            _LinearOutputs(given.ct_carry, given.ct_ys, select(by_row, given.ct_consts))
        )
        if any(x is None for x in known_carry):  # an equation is evaluated later as a whole
            known_carry = jaxpr_as_fun(known_recurrence(linear))(row, *flatten(known))
        sums = zip(by_row, given.ct_consts, found.consts, strict=True)
        ct_consts = [new if is_sum else old + new for is_sum, old, new in sums]
        return [*found.carry, *ct_consts, *known_carry, *found.xs]

    return trace(step, [linear.body.in_avals[0], *flatten(avals)])


def transpose_linear_loop(cts: LoopOutputs, linear: LinearLoop, given: LinearOperands, avals: LoopInputs) -> LoopInputs:
    """Cotangents of the linear inputs, whose types are `avals`, from those of the linear carry and of ys."""
    if error := linear.plan.error:
        raise error
    nonzero_carry, nonzero_ys = map_leaves(lambda ct: not isinstance(ct, ad.Zero), cts)
    needed = _needed_carry(linear, nonzero_carry, nonzero_ys)
    if not all(needed):
        slim, keep = _with_carry(linear, needed), select(linear.linear_carry, needed)
        kept = cts._replace(carry=select(keep, cts.carry))
        found = transpose_linear_loop(kept, slim, given, avals._replace(carry=select(keep, avals.carry)))
        none = map(ad.Zero, reject(keep, avals.carry))
        return found._replace(carry=merge_lists(keep, none, found.carry))
    step = transposed_step(linear, nonzero_ys)
    start = [*map(written_out, cts.carry), *map(zeros, avals.consts)]
    xs = [*given.known.xs, *select(nonzero_ys, cts.ys)]
    carry, ct_xs = (_sweep_back if given.known.carry else _run_back)(linear, step, given, start, xs)
    num_carry = len(cts.carry)
    return LoopInputs(consts=carry[num_carry:], carry=carry[:num_carry], xs=ct_xs)


@weakly_cached
def _needed_carry(linear: LinearLoop, nonzero_carry: Mask, nonzero_ys: Mask) -> Mask:
    """Which leaves of the carry the transpose needs: the known ones, and the linear ones that get a cotangent."""
    of_linear = iter(nonzero_carry)
    needed = tuple(not is_linear or next(of_linear) for is_linear in linear.linear_carry)
    while True:
        used = linear.inputs(dce(linear.body, [*needed, *nonzero_ys], False)[1][1:]).carry
        if either(needed, used) == needed:
            return needed
        needed = either(needed, used)


@weakly_cached
def _with_carry(linear: LinearLoop, needed: Mask) -> LinearLoop:
    """The loop with these leaves of the carry alone: the others get no cotangent."""
    avals = linear.inputs(linear.body.in_avals[1:])

    def with_zeros(body: ClosedJaxpr) -> ClosedJaxpr:
        function = jaxpr_as_fun(body)

        def slim(row: Any, *operands: Any) -> list[Any]:
            consts, kept, xs = split_list(operands, [len(avals.consts), sum(needed)])
            carry = merge_lists(needed, list(map(zeros, reject(needed, avals.carry))), kept)
            carry, ys = linear.outputs(function(row, *consts, *carry, *xs))
            return [*select(needed, carry), *ys]

        closed = trace(slim, [body.in_avals[0], *avals.consts, *select(needed, avals.carry), *avals.xs])
        return dce(closed, [True] * len(closed.out_avals), True)[0]

    return linear._replace(
        body=with_zeros(linear.body),
        linear_carry=tuple(select(needed, linear.linear_carry)),
        saved=linear.saved and tuple(select(select(linear.linear_carry, needed), linear.saved)),
        inverse=linear.inverse and with_zeros(linear.inverse),
    )


def _sweep_back(
    linear: LinearLoop, step: ClosedJaxpr, given: LinearOperands, carry: list[Any], xs: list[Any]
) -> LoopOutputs:
    """Take the transposed steps in a reverse sweep, which recomputes the known carry before each step."""
    known, (rows,) = given.known, given.checkpoint_rows
    sweep = sweep_of(linear, step)
    return run_sweep(sweep, given.low, given.high, rows, known.consts, known.carry, given.saved, carry, xs)


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
        saving=linear.saving,
        inverse=part_of_inverse(linear.inverse, invert(flatten(linear.masks)), invert(linear.linear_carry)),
        **traversal(linear),
    )


def _run_back(
    linear: LinearLoop, step: ClosedJaxpr, given: LinearOperands, carry: list[Any], xs: list[Any]
) -> LoopOutputs:
    """Take the transposed steps in a loop: they need no known carry, or read it from rows of xs."""
    consts = given.known.consts
    loop = Loop(step, num_consts=len(consts), num_carry=len(carry), predicated=False, **traversal(linear))
    out = run(loop._replace(reverse=not linear.reverse), given.low, given.high, consts, carry, xs)
    return LoopOutputs(out.carry, out.ys)


def _transpose(cts: Sequence[Any], *flat: Any, **params: Any) -> list[Any]:
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
    found = transpose_linear_loop(linear_cts, linear, given, avals)
    return cotangents_of_linear(flat, given.linear, found)


def cotangents_of_linear(flat: Sequence[Any], linear: Groups, cts: Groups) -> list[Any]:
    """The answer of a transpose rule whose last operands are the linear ones: None for those that have a value."""
    pairs = zip(flatten(cts), flatten(linear), strict=True)
    wanted = [ct if ad.is_undefined_primal(x) else None for ct, x in pairs]
    return [None] * (len(flat) - len(wanted)) + wanted


def type_of_linear(x: Any) -> Any:
    """The type of an operand in which something is transposed, or of one that JAX gives as a value."""
    return x.aval if ad.is_undefined_primal(x) else jax.typeof(x)


register(
    linear_loop_p,
    meaning=_whole,
    params=LinearLoop._fields,
    abstract_eval=_abstract,
    typecheck=_typecheck,
    jvp=jvp_expanded(_whole),
    linearize=linearize_expanded(_whole),
    transpose=_transpose,
    batch=batch_expanded(linear_loop_p, _whole),
)
step_limits[linear_loop_p] = lambda eqn: (LinearLoop(**eqn.params).bound, False)
