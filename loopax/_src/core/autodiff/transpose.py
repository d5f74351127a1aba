"""The linear rest of a loop whose other part has been run: what reverse mode transposes.

Operands are `low, high, *known consts, *known init, *saved, checkpoint_rows, *known xs, *linear consts, *linear init,
*linear xs`, results the linear part of the carry, the ys (all linear) and linear saved carries. Run
as it stands (by `jax.linearize`), it is the whole loop, known part included. Transposed, it is a loop
over the same rows in the other direction, which needs the known carry before every step: it has none
(a linear recurrence, or everything needed comes as rows of xs), or it replays it from `saved`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from loopax._src.core.ir.kind import Nothing, Storage
from loopax._src.core.ir.lane_stages import Stages
from loopax._src.core.ir.loop import Loop, run
from loopax._src.core.ir.reverse_sweep import ReverseSweep, run_sweep
from loopax._src.core.ir.typecheck import check_checkpoints, check_count, check_loop
from loopax._src.core.jaxpr.cost import step_limits
from loopax._src.core.jaxpr.expand import batch_expanded, jvp_expanded
from loopax._src.core.jaxpr.util import (
    Mask,
    invert,
    merge_lists,
    reject,
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
    """The static description of the linear rest of a loop."""

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
    def masks(self) -> list[Mask]:
        """Which consts, carry leaves and xs are linear."""
        return [self.linear_consts, self.linear_carry, self.linear_xs]

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

    @property
    def input_avals(self) -> list[list[Any]]:
        """The types of consts, carry and rows of xs."""
        return split_list(self.body.in_avals[1:], [len(self.linear_consts), len(self.linear_carry)])

    @property
    def output_avals(self) -> list[list[Any]]:
        """The types of the linear carry and of rows of ys."""
        carry, ys = split_list(self.body.out_avals, [len(self.linear_carry)])
        return [select(self.linear_carry, carry), ys]

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
    known_consts: list[Any]
    known_init: list[Any]
    saved: list[Any]
    checkpoint_rows: list[Any]
    known_xs: list[Any]
    consts: list[Any]
    init: list[Any]
    xs: list[Any]

    @classmethod
    def of(cls, linear: LinearLoop, operands: Sequence[Any]) -> "LinearOperands":
        """Cut a flat list."""
        low, high, *rest = operands
        sizes = [*linear.known_sizes, *linear.linear_sizes]
        *groups, _ = split_list(rest, sizes)
        return cls(low, high, *groups)


linear_loop_p = new_primitive("linear_loop")


def _whole(*flat: Any, **params: Any) -> list[Any]:
    """The linear loop as the loop that it is the rest of."""
    linear = LinearLoop(**params)
    given = LinearOperands.of(linear, flat)
    loop = linear.as_loop
    out = run(
        loop,
        given.low,
        given.high,
        merge_lists(linear.linear_consts, given.known_consts, given.consts),
        merge_lists(linear.linear_carry, given.known_init, given.init),
        merge_lists(linear.linear_xs, given.known_xs, given.xs),
    )
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
    check_loop(
        "linear_loop",
        linear.as_loop,
        [given.low, given.high],
        merge_lists(linear.linear_consts, given.known_consts, given.consts),
        merge_lists(linear.linear_carry, given.known_init, given.init),
        merge_lists(linear.linear_xs, given.known_xs, given.xs),
    )
    if given.checkpoint_rows and linear.saving:
        (numbers,), states = given.checkpoint_rows, reject(linear.linear_carry, linear.input_avals[1])
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
    consts, carry, xs = linear.input_avals
    function = chained(linear.body)
    # Where such a constant is only read row by row, its cotangent is added to row by row.
    read = read_only(linear.body, range(1, 1 + len(linear.linear_consts)))
    by_row = select(linear.linear_consts, read)
    inputs = [
        reject(linear.linear_consts, consts),
        select(linear.linear_carry, carry),
        select(linear.linear_consts, consts),
        reject(linear.linear_carry, carry),
        reject(linear.linear_xs, xs),
        select(nonzero_ys, linear.output_avals[1]),
    ]

    def step(row: Any, *operands: Any) -> list[Any]:
        known_consts, ct_carry, ct_consts, known_carry, known_x, ct_y = split_list(operands, list(map(len, inputs)))[
            :-1
        ]

        def linear_part(consts: list[Any], carry: list[Any], xs: list[Any]) -> tuple[list[Any], ...]:
            out, last = function(
                row,
                *merge_lists(linear.linear_consts, known_consts, consts),
                *merge_lists(linear.linear_carry, known_carry, carry),
                *merge_lists(linear.linear_xs, known_x, xs),
            )
            new_carry, y = split_list(out, [len(linear.linear_carry)])
            last_consts = select(linear.linear_consts, last[1 : 1 + len(linear.linear_consts)])
            return select(linear.linear_carry, new_carry), select(nonzero_ys, y), select(by_row, last_consts)

        arguments = [inputs[2], inputs[1], select(linear.linear_xs, xs)]
        transpose = jax.linear_transpose(linear_part, *([strong(a) for a in group] for group in arguments))
        more_consts, ct_carry, ct_x = transpose((ct_carry, ct_y, select(by_row, ct_consts)))
        sums = [b if is_sum else a + b for is_sum, a, b in zip(by_row, ct_consts, more_consts, strict=True)]
        return [*ct_carry, *sums, *ct_x]

    return trace(step, [linear.body.in_avals[0], *(aval for group in inputs for aval in group)])


def transpose_linear_loop(
    cts: Sequence[Any], linear: LinearLoop, given: LinearOperands, avals: Sequence[Any]
) -> list[Any]:
    """Cotangents of the linear consts, init and xs, whose types are `avals`."""
    if isinstance(linear.storage, Nothing):
        raise linear.storage.error(linear.storage.message)
    num_carry, num_ys = sum(linear.linear_carry), len(linear.output_avals[1])
    # Cotangents of saved carries are zeros, if perhaps written out by a loop around this one: only sweeps use
    # what is saved, and they have their derivatives with respect to `init`.
    ct_carry, ct_ys, _ = split_list(cts, [num_carry, num_ys])
    nonzero_ys = tuple(not isinstance(ct, ad.Zero) for ct in ct_ys)
    step = transposed_step(linear, nonzero_ys)
    ct_consts = [zeros(aval) for aval in avals[: sum(linear.linear_consts)]]
    carry = [*map(written_out, ct_carry), *ct_consts]
    xs = [*given.known_xs, *select(nonzero_ys, ct_ys)]
    if given.known_init:
        assert linear.saving is not None
        backward = ReverseSweep(
            known_recurrence(linear),
            step,
            num_consts=len(given.known_consts),
            num_state=len(given.known_init),
            num_carry=len(carry),
            num_forward_xs=len(given.known_xs),
            bound=linear.bound,
            saving=linear.saving,
            reverse=linear.reverse,
            unroll=linear.unroll,
            storage=linear.storage,
            stages=linear.stages,
        )
        (checkpoint_rows,) = given.checkpoint_rows
        out_carry, ct_xs = run_sweep(
            backward,
            given.low,
            given.high,
            checkpoint_rows,
            given.known_consts,
            given.known_init,
            given.saved,
            carry,
            xs,
        )
    else:
        loop = Loop(
            step,
            num_consts=len(given.known_consts),
            num_carry=len(carry),
            bound=linear.bound,
            reverse=not linear.reverse,
            predicated=False,
            unroll=linear.unroll,
            storage=linear.storage,
            stages=linear.stages,
        )
        out = run(loop, given.low, given.high, given.known_consts, carry, xs)
        out_carry, ct_xs = out.carry, out.ys
    ct_carry, ct_consts = split_list(out_carry, [num_carry])
    return [*ct_consts, *ct_carry, *ct_xs]


def _transpose(cts: Sequence[Any], *flat: Any, **params: Any) -> list[Any]:
    """Operands are those of `LinearOperands`; only linear ones have cotangents, those that are known do not."""
    linear = LinearLoop(**params)
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [None] * len(flat)
    given = LinearOperands.of(linear, flat)
    operands = [*given.consts, *given.init, *given.xs]
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in operands]
    found = transpose_linear_loop(cts, linear, given, avals)
    wanted = [ct if ad.is_undefined_primal(x) else None for ct, x in zip(found, operands, strict=True)]
    return [None] * (len(flat) - len(operands)) + wanted


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
