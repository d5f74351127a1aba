"""The linear part of a loop: its primitive, what its operands are, and what it means.

Operands are `low, high, *known consts, *known init, *saved, checkpoint_rows, *known xs, *linear consts, *linear init,
*linear xs`. Results are the linear leaves of the carry, the ys (all are linear) and the saved linear carries. Run as it
stands (by `jax.linearize`), the linear part evaluates the whole loop, known part included. Reverse mode transposes it
(`autodiff/transpose.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lanes import Lanes, Lockstep
from loopax._src.core.ir.loop import (
    Loop,
    LoopInputs,
    LoopOutputs,
    checkpoints_expected,
    loop_expected,
    result_avals,
    run,
    traversal,
)
from loopax._src.core.ir.plan import Plan, Saving
from loopax._src.core.jaxpr.types import Expected
from loopax._src.core.jaxpr.util import Mask, flatten, grouped, merge_each, reject_each, select_each, split_list
from loopax._src.jax_internals import ClosedJaxpr, new_primitive


class LinearLoop(NamedTuple):
    """The static description of the linear part of a loop."""

    body: ClosedJaxpr  # (row, *consts, *carry, *x) -> (*carry, *y), known and linear leaves mixed
    linear_consts: Mask
    linear_carry: Mask
    linear_xs: Mask
    bound: int | None
    reverse: bool
    unroll: int
    plan: Plan  # what a gradient stores, of this part, too
    saving: Saving | None = None  # which known carries the loop has saved
    saved: Mask = ()  # which linear leaves of the carry are saved, if the loop itself saves
    lanes: Lanes = Lockstep()  # as in `Loop`
    inverse: ClosedJaxpr | None = None  # of the whole loop, as in `Loop`
    may_discard: bool = False  # as in `Loop`
    watch: Any = None  # as in `Loop`

    @property
    def masks(self) -> LoopInputs:
        """Which consts, carry leaves and xs are linear."""
        return LoopInputs(self.linear_consts, self.linear_carry, self.linear_xs)

    @property
    def linear_outputs(self) -> LoopOutputs:
        """Which leaves of the carry and which ys are linear: of the ys, all."""
        return LoopOutputs(self.linear_carry, (True,) * (len(self.body.out_avals) - len(self.linear_carry)))

    @property
    def known_sizes(self) -> list[int]:
        """Lengths of known consts, known init, saved, checkpoint_rows and known xs among the operands."""
        consts, carry, xs = (mask.count(False) for mask in self.masks)
        recomputes = carry > 0 and self.saving is not None
        return [consts, carry, carry if recomputes else 0, int(recomputes), xs]

    def inputs(self, leaves: Sequence[Any]) -> LoopInputs:
        """By name what stands for each input of the body behind the row."""
        return grouped(LoopInputs, leaves, len(self.linear_consts), len(self.linear_carry))

    def outputs(self, leaves: Sequence[Any]) -> LoopOutputs:
        """By name what stands for each output of the body."""
        return grouped(LoopOutputs, leaves, len(self.linear_carry))

    @property
    def input_avals(self) -> LoopInputs:
        """The types of consts, carry and rows of xs."""
        return self.inputs(self.body.in_avals[1:])

    @property
    def output_avals(self) -> LoopOutputs:
        """The types of the linear carry and of rows of ys, which are all linear."""
        return select_each(self.linear_outputs, self.outputs(self.body.out_avals))

    @property
    def as_loop(self) -> Loop:
        """The whole loop, known part included."""
        of_linear = iter(self.saved)
        return Loop(
            self.body,
            num_consts=len(self.linear_consts),
            num_carry=len(self.linear_carry),
            predicated=False,
            kind=Decided(self.plan),
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
        sizes = [*linear.known_sizes, *map(sum, linear.masks)]
        consts, carry, saved, rows, xs, *groups, _ = split_list(rest, sizes)
        return cls(low, high, LoopInputs(consts, carry, xs), saved, rows, LoopInputs(*groups))

    @property
    def leaves(self) -> list[Any]:
        """The flat list."""
        consts, carry, xs = self.known
        limits = [self.low, self.high]
        return [*limits, *consts, *carry, *self.saved, *self.checkpoint_rows, *xs, *flatten(self.linear)]


linear_loop_p = new_primitive("linear_loop")


def whole_loop(*flat: Any, **params: Any) -> list[Any]:
    """The whole loop, known part included; returns what is linear of its results."""
    linear = LinearLoop(**params)
    given = LinearOperands.of(linear, flat)
    out = run(linear.as_loop, given.low, given.high, *merge_each(linear.masks, given.known, given.linear))
    return [*flatten(select_each(linear.linear_outputs, LoopOutputs(out.carry, out.ys))), *out.saved]


def linear_abstract_eval(*_: Any, **params: Any) -> list[Any]:
    """The types of the linear carry, of the ys and of the saved linear carries."""
    linear = LinearLoop(**params)
    types = result_avals(linear.as_loop)
    return [*linear.output_avals.carry, *types.ys, *types.saved]


def linear_expected(*avals: Any, **params: Any) -> Expected:
    """The types that the whole loop takes, and of what its known part has saved."""
    linear = LinearLoop(**params)
    given = LinearOperands.of(linear, avals)
    yield "operands", given.leaves, avals
    inputs = flatten(merge_each(linear.masks, given.known, given.linear))
    yield from loop_expected(given.low, given.high, *inputs, **linear.as_loop._asdict())
    if given.checkpoint_rows and linear.saving:
        (numbers,), states = given.checkpoint_rows, reject_each(linear.masks, linear.input_avals).carry
        yield from checkpoints_expected(states, given.saved, numbers, linear.saving, linear.bound)
