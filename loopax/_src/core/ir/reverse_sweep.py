"""The reverse sweep: a loop that walks backward and reads states that a forward loop has passed.

The meaning, where the forward loop walked the rows `low ... high - 1`::

    states[low] = init
    for row in rows:                      # all but the last, in the forward direction
        states[row + 1] = forward(row, consts, states[row], xs[row])
    for row in reversed(rows):
        carry, ys[row] = backward(row, consts, carry, states[row], xs[row])

`forward` and `backward` are two parts of one body, the *step*, which has all results: what both need is computed once
where both are taken together.

Only some states are stored: `saved` holds those before the rows `checkpoint_rows`, as the forward loop saved them on
its way. The others are recomputed, segment by segment, from the last to the first (`core/lowering/sweep.py`,
`core/lowering/sweep_slots.py`).

Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`, results `*carry, *ys`. As a function, a
sweep depends on the forward loop's `init`. `saved` follows from `init`, and has no derivative of its own in reverse
mode. The primitive is closed under differentiation: the derivative of a sweep is a sweep of the derivatives of both
bodies. So second derivatives store no more than first ones do.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lanes import Lanes, Lockstep
from loopax._src.core.ir.loop import Loop, LoopOutputs, checkpoints_expected, run, traversal
from loopax._src.core.ir.plan import Plan, Saving, with_known_length
from loopax._src.core.jaxpr.accumulate import Carried
from loopax._src.core.jaxpr.dependence import Dependence, close_over_carry, mixed_inputs_of_steps, union
from loopax._src.core.jaxpr.types import Axes, Expected, differing, localized, numbers_expected, rows_expected, varying
from loopax._src.core.jaxpr.util import flatten, grouped, stacked, weakly_cached
from loopax._src.core.masking import without_transpose
from loopax._src.jax_internals import ClosedJaxpr, dce, new_primitive


class SweepInputs(NamedTuple):
    """What stands for each input of the bodies of a sweep behind the row: an array, a type, whether it is known."""

    consts: Sequence[Any]
    state: Sequence[Any]  # of the forward loop
    carry: Sequence[Any]  # of the backward walk
    xs: Sequence[Any]


class SweepOperands(NamedTuple):
    """What stands for each operand of a sweep behind `low, high, checkpoint_rows`."""

    consts: Sequence[Any]
    init: Sequence[Any]
    saved: Sequence[Any]
    carry: Sequence[Any]
    xs: Sequence[Any]

    def inputs(self, state: Sequence[Any]) -> SweepInputs:
        """Those of the bodies, with what stands for the states, which come from `init` and `saved`."""
        return SweepInputs(self.consts, state, self.carry, self.xs)

    @classmethod
    def of(cls, inputs: SweepInputs) -> "SweepOperands":
        """What the bodies' inputs say of the operands: `init` and `saved` are states."""
        consts, state, carry, xs = inputs
        return cls(consts, state, state, carry, xs)


class SweepOutputs(NamedTuple):
    """What stands for each result of the step of a sweep."""

    carry: Sequence[Any]
    state: Sequence[Any]
    ys: Sequence[Any]


class ReverseSweep(NamedTuple):
    """The static description of a reverse sweep."""

    step: ClosedJaxpr  # (row, *consts, *carry, *state, *x) -> (*carry, *state, *y)
    num_consts: int
    num_state: int
    num_carry: int
    num_forward_xs: int  # the next state depends on the first xs alone, and never on the carry
    bound: int | None
    saving: Saving  # what the forward loop saved
    reverse: bool  # the direction of `forward`
    unroll: int
    plan: Plan  # what reverse mode through the sweep stores
    lanes: Lanes = Lockstep()  # as in `Loop`
    inverse: ClosedJaxpr | None = None  # (row, *consts, *state after a step, *forward x) -> state before it
    may_discard: bool = False  # as in `Loop`

    @property
    @weakly_cached
    def forward(self) -> ClosedJaxpr:
        """(row, *consts, *state, *forward x) -> state. Effects of the step are those of its backward part."""
        front = [True] * self.num_forward_xs + [False] * (len(self.xs_range) - self.num_forward_xs)
        keep = [True] * (1 + self.num_consts) + [False] * self.num_carry + [True] * self.num_state + front
        wanted = [False] * self.num_carry + [True] * self.num_state + [False] * len(self.y_avals)
        forward, used = dce(without_effects(self.step), wanted, keep)
        assert used == keep
        return without_transpose(forward)

    @property
    @weakly_cached
    def backward(self) -> ClosedJaxpr:
        """(row, *consts, *carry, *state, *x) -> (*carry, *y)."""
        wanted = [True] * self.num_carry + [False] * self.num_state + [True] * len(self.y_avals)
        return dce(self.step, wanted, True)[0]

    @property
    def xs_range(self) -> range:
        """Where the rows of xs stand among the inputs of the step."""
        return range(1 + self.num_consts + self.num_carry + self.num_state, len(self.step.in_avals))

    def operands(self, leaves: Sequence[Any]) -> SweepOperands:
        """By name what stands for each operand behind `low, high, checkpoint_rows`."""
        return grouped(SweepOperands, leaves, self.num_consts, self.num_state, self.num_state, self.num_carry)

    def outputs(self, leaves: Sequence[Any]) -> LoopOutputs:
        """By name what stands for each leaf of the carry and each of the ys."""
        return grouped(LoopOutputs, leaves, self.num_carry)

    def step_outputs(self, leaves: Sequence[Any]) -> SweepOutputs:
        """By name what stands for each result of the step."""
        return grouped(SweepOutputs, leaves, self.num_carry, self.num_state)

    def forward_inputs(self, inputs: SweepInputs) -> list[Any]:
        """In the order of the forward body, behind the row."""
        return [*inputs.consts, *inputs.state, *inputs.xs[: self.num_forward_xs]]

    def backward_inputs(self, inputs: SweepInputs) -> list[Any]:
        """In the order of the step and of the backward body, behind the row."""
        return [*inputs.consts, *inputs.carry, *inputs.state, *inputs.xs]

    def of_backward(self, leaves: Sequence[Any]) -> SweepInputs:
        """The inverse of `backward_inputs`."""
        given = grouped(SweepInputs, leaves, self.num_consts, self.num_carry, self.num_state)
        return given._replace(state=given.carry, carry=given.state)  # there, the carry stands before the state

    @property
    def state_range(self) -> range:
        """Where the states stand among the inputs of the forward body."""
        return range(1 + self.num_consts, 1 + self.num_consts + self.num_state)

    @property
    def carry_range(self) -> range:
        """Where the carry stands among the inputs of the backward body."""
        return range(1 + self.num_consts, 1 + self.num_consts + self.num_carry)

    @property
    def forward_avals(self) -> SweepInputs:
        """The types of consts, state and rows of the xs that `forward` reads."""
        of_step = self.of_backward(self.step.in_avals[1:])
        return of_step._replace(carry=[], xs=of_step.xs[: self.num_forward_xs])

    @property
    def backward_avals(self) -> SweepInputs:
        """The types of consts, state, carry and rows of xs."""
        return self.of_backward(self.step.in_avals[1:])

    @property
    def y_avals(self) -> list[Any]:
        """The types of rows of ys."""
        return self.step.out_avals[self.num_carry + self.num_state :]


reverse_sweep_p = new_primitive("reverse_sweep")


def run_sweep(
    sweep: ReverseSweep,
    low: Any,
    high: Any,
    checkpoint_rows: Any,
    consts: Sequence[Any],
    init: Sequence[Any],
    saved: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
) -> LoopOutputs:
    """Bind the primitive, as `run` does."""
    sweep, axes = as_bound(sweep, low, high, checkpoint_rows)
    operands = varying([*consts, *init, *saved, *carry, *xs], axes)
    outputs = reverse_sweep_p.bind(low, high, checkpoint_rows, *operands, **sweep._asdict())
    return sweep.outputs(outputs)


def as_bound(sweep: ReverseSweep, low: Any, high: Any, checkpoint_rows: Any) -> tuple[ReverseSweep, Axes]:
    """The sweep as it is bound, whose operands vary over these axes: devices take different numbers of steps."""
    axes = differing([low, high, checkpoint_rows])
    if axes:
        inverse = sweep.inverse and (localized(sweep.inverse, axes) or sweep.inverse)
        sweep = sweep._replace(step=localized(sweep.step, axes) or sweep.step, inverse=inverse)
    return sweep, axes


def sweep_abstract_eval(*_: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of the results, and the effects of the step, which are those of its backward part.

    Results are `*carry, *ys`: the carry as the backward body returns it, ys with `bound` rows.
    """
    sweep = ReverseSweep(**params)
    carry = sweep.step.out_avals[: sweep.num_carry]
    return [*carry, *(stacked(aval, sweep.bound or 0) for aval in sweep.y_avals)], sweep.step.effects


def checkpointing_loop(sweep: ReverseSweep) -> Loop:
    """The forward loop of a sweep, which saves its whole carry, as a sweep of known length expects it."""
    return Loop(
        sweep.forward,
        num_consts=sweep.num_consts,
        num_carry=sweep.num_state,
        predicated=False,
        kind=Decided(sweep.plan),
        inverse=sweep.inverse,
        saving=sweep.saving,
        saved=(True,) * sweep.num_state,
        **traversal(sweep),
    )


def checkpoint_and_sweep(sweep: ReverseSweep, low: Any, high: Any, inputs: SweepInputs) -> LoopOutputs:
    """The whole sweep where nothing has been saved yet: run forward saving, then sweep back."""
    sweep = sweep._replace(saving=with_known_length(sweep.saving))
    loop = checkpointing_loop(sweep)
    consts, init, carry, xs = inputs
    out = run(loop, low, high, consts, init, xs[: sweep.num_forward_xs])
    (checkpoint_rows,) = out.checkpoint_rows
    return run_sweep(sweep, low, high, checkpoint_rows, consts, init, out.saved, carry, xs)


def sweep_dependence(eqn: Any, of_program: Dependence) -> list[int]:
    """Which operands each result depends on: exact, so that a primal sweep inside another loop's body stays known."""
    sweep = ReverseSweep(**eqn.params)
    low, high, checkpoint_rows, *leaves = (1 << i for i in range(len(eqn.invars)))
    operands = sweep.operands(leaves)
    inputs = operands.inputs([a | b for a, b in zip(operands.init, operands.saved, strict=True)])
    start = [0, *sweep.forward_inputs(inputs)]
    # Walking back reads no more than walking forward, from which the states follow.
    inputs = inputs._replace(state=close_over_carry(of_program(sweep.forward), sweep.state_range, start))
    needed = sweep.outputs(of_program(sweep.backward))
    start = [0, *sweep.backward_inputs(inputs)]
    inputs = inputs._replace(carry=close_over_carry(needed.carry, sweep.carry_range, start))
    ends = [0, *sweep.backward_inputs(inputs)]
    ys = [union(ends, bits) for bits in needed.ys]
    return [low | high | checkpoint_rows | bits for bits in (*inputs.carry, *ys)]


def sweep_mixed_operands(eqn: Any) -> list[bool]:
    """Which operands flow into what mixes lanes in the step, whose carry and state go from step to step."""
    sweep = ReverseSweep(**eqn.params)
    carried = range(sweep.carry_range.start, sweep.carry_range.stop + sweep.num_state)
    mixed = mixed_inputs_of_steps(sweep.step, carried)
    decides = any(mixed[i] for i in carried)
    return [decides, decides, False, *flatten(SweepOperands.of(sweep.of_backward(mixed[1:])))]


def sweep_expected(*avals: Any, **params: Any) -> Expected:
    """The types of `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs` that both bodies take."""
    sweep = ReverseSweep(**params)
    low, high, rows, *leaves = avals
    given = sweep.operands(leaves)
    yield from step_expected(sweep, [low, high], given.inputs(given.init))
    yield from checkpoints_expected(sweep.forward_avals.state, given.saved, rows, sweep.saving, sweep.bound)


def step_expected(sweep: ReverseSweep, limits: Sequence[Any], given: SweepInputs) -> Expected:
    """The types that the step of a sweep takes, which must fit its results."""
    expected, returned = sweep.backward_avals, sweep.step_outputs(sweep.step.out_avals)
    yield from numbers_expected("low and high", limits)
    yield "consts", expected.consts, given.consts
    yield "init", expected.state, given.state
    yield "states that the step returns", expected.state, returned.state
    yield "carry", expected.carry, given.carry
    yield "carry that the step returns", expected.carry, returned.carry
    yield from rows_expected("xs", expected.xs, given.xs, sweep.bound)


def carried_by_sweep(eqn: Any) -> Iterator[Carried]:
    """The leaves that a sweep carries."""
    sweep = ReverseSweep(**eqn.params)
    for k, i in enumerate(sweep.carry_range):
        yield Carried(2 + 2 * sweep.num_state + i, k, sweep.backward, i, k)
