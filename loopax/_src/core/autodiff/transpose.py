"""The linear part of a loop whose known part has been run: what reverse mode transposes.

Operands are `low, high, *known consts, *known init, *saved, checkpoint_rows, *known xs, *linear consts, *linear init,
*linear xs`, results the linear part of the carry, the ys (all linear) and linear saved carries. Run
as it stands (by `jax.linearize`), it is the whole loop, known part included. Transposed, it is a loop
over the same rows in the other direction, which needs the known carry before every step: it has none
(a linear recurrence, or everything needed comes as rows of xs), or a reverse sweep finds it again from `saved`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from loopax._src.core.ir.kind import Nothing, Storage
from loopax._src.core.ir.lane_stages import Stages
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, run
from loopax._src.core.ir.reverse_sweep import ReverseSweep, run_sweep
from loopax._src.core.ir.typecheck import check_checkpoints, check_count, check_loop
from loopax._src.core.jaxpr.cost import step_limits
from loopax._src.core.jaxpr.expand import batch_expanded, jvp_expanded
from loopax._src.core.jaxpr.groups import flatten, map_leaves, merge_each, reject_each, select_each
from loopax._src.core.jaxpr.util import (
    Mask,
    invert,
    merge_lists,
    select,
    split_list,
    stacked,
    trace,
    weakly_cached,
    written_out,
)
from loopax._src.core.row_buffers.versions import chained, read_only
from loopax._src.jax_internals import ClosedJaxpr, ad, dce, new_primitive, register, strong, zeros
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

    @property
    def masks(self) -> LoopInputs:
        """Which consts, carry leaves and xs are linear."""
        return LoopInputs(self.linear_consts, self.linear_carry, self.linear_xs)

    @property
    def known_sizes(self) -> list[int]:
        """Lengths of known consts, known init, saved, checkpoint_rows and known xs among the operands."""
        consts, carry, xs = (mask.count(False) for mask in self.masks)
        replays = carry > 0 and self.saving is not None
        return [consts, carry, carry if replays else 0, int(replays), xs]

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
        saved = tuple(
            merge_lists(
                self.linear_carry,
                (False,) * self.linear_carry.count(False),
                self.saved or (False,) * sum(self.linear_carry),
            )
        )
        return Loop(
            self.body,
            num_consts=len(self.linear_consts),
            num_carry=len(self.linear_carry),
            bound=self.bound,
            reverse=self.reverse,
            predicated=False,
            unroll=self.unroll,
            storage=self.storage,
            saving=self.saving if any(saved) else None,
            saved=saved if any(saved) else (),
            stages=self.stages,
        )


class LinearOperands(NamedTuple):
    """The operands of a linear loop by name."""

    low: Any
    high: Any
    known: LoopInputs
    saved: list[Any]  # known carries before some steps, where the loop replays
    checkpoint_rows: list[Any]  # one array: before which steps; none where the loop does not replay
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
    """The linear part as the loop of which it is a part, known part included."""
    linear = LinearLoop(**params)
    given = LinearOperands.of(linear, flat)
    out = run(linear.as_loop, given.low, given.high, *merge_each(linear.masks, given.known, given.linear))
    return [*select(linear.linear_carry, out.carry), *out.ys, *out.saved]


def _abstract(*_: Any, **params: Any) -> list[Any]:
    linear = LinearLoop(**params)
    carry, ys = linear.output_avals
    saved = select(linear.saved or (False,) * len(carry), carry)
    loop = linear.as_loop
    return [*carry, *(stacked(a, linear.bound or 0) for a in ys), *(stacked(a, loop.saved_rows) for a in saved)]


def _typecheck(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of the results, if operands fit the whole loop, and what was saved its known part."""
    linear = LinearLoop(**params)
    check_count("linear_loop", 2 + sum(linear.known_sizes) + sum(linear.linear_sizes), avals)
    given = LinearOperands.of(linear, avals)
    inputs = merge_each(linear.masks, given.known, given.linear)
    check_loop("linear_loop", linear.as_loop, [given.low, given.high], *map(list, inputs))
    if given.checkpoint_rows and linear.saving:
        (numbers,), states = given.checkpoint_rows, reject_each(linear.masks, linear.input_avals).carry
        check_checkpoints("linear_loop", states, given.saved, numbers, linear.saving, linear.bound)
    return _abstract(*avals, **params), frozenset()


@weakly_cached
def known_recurrence(linear: LinearLoop) -> ClosedJaxpr:
    """The known part of the carry: (row, *known consts, *known carry, *known x) -> known carry."""
    wanted = [*invert(linear.linear_carry), *(False for _ in linear.output_avals[1])]
    known = [True, *(flag for mask in linear.masks for flag in invert(mask))]
    return dce(linear.body, wanted, known)[0]


@weakly_cached
def transposed_step(linear: LinearLoop, nonzero_ys: Mask) -> ClosedJaxpr:
    """One step backward.

    (row, *known consts, *ct carry, *ct consts, *known carry, *known x, *ct y)
    -> (*ct carry, *ct consts, *ct x): cotangents of constants add up in the carry.
    """
    function = chained(linear.body)
    # Where such a constant is only read row by row, its cotangent is added to row by row.
    read = read_only(linear.body, range(1, 1 + len(linear.linear_consts)))
    by_row = select(linear.linear_consts, read)
    known, cts = (each(linear.masks, linear.input_avals) for each in (reject_each, select_each))
    ct_ys = select(nonzero_ys, linear.output_avals.ys)
    inputs = [known.consts, cts.carry, cts.consts, known.carry, known.xs, ct_ys]

    def step(row: Any, *operands: Any) -> list[Any]:
        groups = split_list(operands, list(map(len, inputs)))[:-1]
        known_consts, ct_carry, ct_consts, known_carry, known_x, ct_y = groups

        def linear_part(*linear_inputs: list[Any]) -> tuple[list[Any], ...]:
            given = LoopInputs(known_consts, known_carry, known_x)
            out, last = function(row, *flatten(merge_each(linear.masks, given, LoopInputs(*linear_inputs))))
            new_carry, y = linear.outputs(out)
            last_consts = select(linear.linear_consts, last[1 : 1 + len(linear.linear_consts)])
            return select(linear.linear_carry, new_carry), select(nonzero_ys, y), select(by_row, last_consts)

        transpose = jax.linear_transpose(linear_part, *([strong(a) for a in group] for group in cts))
        more_consts, ct_carry, ct_x = transpose((ct_carry, ct_y, select(by_row, ct_consts)))
        sums = [b if is_sum else a + b for is_sum, a, b in zip(by_row, ct_consts, more_consts, strict=True)]
        return [*ct_carry, *sums, *ct_x]

    return trace(step, [linear.body.in_avals[0], *flatten(inputs)])


def transpose_linear_loop(cts: LoopOutputs, linear: LinearLoop, given: LinearOperands, avals: LoopInputs) -> LoopInputs:
    """Cotangents of the linear inputs, whose types are `avals`, from those of the linear carry and of ys."""
    if isinstance(linear.storage, Nothing):
        raise linear.storage.error(linear.storage.message)
    nonzero_ys = tuple(not isinstance(ct, ad.Zero) for ct in cts.ys)
    step = transposed_step(linear, nonzero_ys)
    start = [*map(written_out, cts.carry), *map(zeros, avals.consts)]
    xs = [*given.known.xs, *select(nonzero_ys, cts.ys)]
    carry, ct_xs = (_sweep_back if given.known.carry else _run_back)(linear, step, given, start, xs)
    ct_carry, ct_consts = split_list(carry, [len(cts.carry)])
    return LoopInputs(ct_consts, ct_carry, ct_xs)


def _sweep_back(
    linear: LinearLoop, step: ClosedJaxpr, given: LinearOperands, carry: list[Any], xs: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Take the transposed steps in a reverse sweep, which finds the known carry before each step again."""
    assert linear.saving is not None
    known = given.known
    backward = ReverseSweep(
        known_recurrence(linear),
        step,
        num_consts=len(known.consts),
        num_state=len(known.carry),
        num_carry=len(carry),
        num_forward_xs=len(known.xs),
        bound=linear.bound,
        saving=linear.saving,
        reverse=linear.reverse,
        unroll=linear.unroll,
        storage=linear.storage,
        stages=linear.stages,
    )
    (rows,) = given.checkpoint_rows
    return run_sweep(backward, given.low, given.high, rows, known.consts, known.carry, given.saved, carry, xs)


def _run_back(
    linear: LinearLoop, step: ClosedJaxpr, given: LinearOperands, carry: list[Any], xs: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Take the transposed steps in a loop: they need no known carry, or read it from rows of xs."""
    loop = Loop(
        step,
        num_consts=len(given.known.consts),
        num_carry=len(carry),
        bound=linear.bound,
        reverse=not linear.reverse,
        predicated=False,
        unroll=linear.unroll,
        storage=linear.storage,
        stages=linear.stages,
    )
    out = run(loop, given.low, given.high, given.known.consts, carry, xs)
    return out.carry, out.ys


def _transpose(cts: Sequence[Any], *flat: Any, **params: Any) -> list[Any]:
    """Operands are those of `LinearOperands`; only linear ones have cotangents, those that are known do not."""
    linear = LinearLoop(**params)
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [None] * len(flat)
    given = LinearOperands.of(linear, flat)
    avals = map_leaves(type_of_linear, given.linear)
    # Checkpoints get no real cotangent: their only consumer, a reverse sweep, routes derivatives through the start of
    # the carry. An outer loop may have instantiated the symbolic zeros, so they are dropped, not asserted.
    ct_carry, ct_ys, _ = split_list(cts, list(map(len, linear.output_avals)))
    found = flatten(transpose_linear_loop(LoopOutputs(ct_carry, ct_ys), linear, given, avals))
    operands = flatten(given.linear)
    wanted = [ct if ad.is_undefined_primal(x) else None for ct, x in zip(found, operands, strict=True)]
    return [None] * (len(flat) - len(operands)) + wanted


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
    transpose=_transpose,
    batch=batch_expanded(linear_loop_p, _whole),
)
step_limits[linear_loop_p] = lambda eqn: (LinearLoop(**eqn.params).bound, False)
