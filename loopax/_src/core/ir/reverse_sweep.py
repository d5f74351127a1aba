"""The reverse sweep: a loop that walks backward and reads states that a forward loop has passed.

The meaning, where the forward loop walked the rows `low ... high - 1`::

    states[low] = init
    for row in rows:                      # all but the last, in the forward direction
        states[row + 1] = forward(row, consts, states[row], xs[row])
    for row in reversed(rows):
        carry, ys[row] = backward(row, consts, carry, states[row], xs[row])

The states are not stored. `saved` holds those before the rows `checkpoint_rows`, as the forward loop saved them on
its way; segment by segment, from the last to the first, the others are evaluated again
(`core/lowering/sweep_two_level.py`, `core/lowering/sweep_binomial.py`).

Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`, results `*carry, *ys`. As a function,
a replay depends on the forward loop's `init`; `saved` is a hint, and has no
derivative of its own in reverse mode. The primitive is closed under differentiation: a derivative of
a replay is a replay of the derivative of both parts, so second derivatives store no more than
first ones do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from loopax._src.core.ir.kind import Storage
from loopax._src.core.ir.lane_stages import Stages
from loopax._src.core.ir.loop import Loop, run
from loopax._src.core.jaxpr.dataflow import close_over_carry, dependence, union
from loopax._src.core.jaxpr.util import split_list, stacked
from loopax._src.core.jaxpr.varying_axes import Axes, apart, differing, varying
from loopax._src.jax_internals import ClosedJaxpr, new_primitive
from loopax._src.schedule.saving import Saving, length_known


class ReverseSweep(NamedTuple):
    """The static description of a reverse sweep."""

    forward: ClosedJaxpr  # (row, *consts, *state, *forward x) -> state
    backward: ClosedJaxpr  # (row, *consts, *carry, *state, *x) -> (*carry, *y)
    num_consts: int
    num_state: int
    num_carry: int
    num_forward_xs: int  # the first xs are what `forward` reads; `backward` reads all
    bound: int | None
    saving: Saving  # what the forward loop saved
    reverse: bool  # the direction of `forward`
    unroll: int
    storage: Storage  # what reverse mode through the sweep stores
    stages: Stages | None = None  # as in `Loop`

    @property
    def sizes(self) -> list[int]:
        """Lengths of consts, init, saved and carry among the operands, for `split_list`."""
        return [self.num_consts, self.num_state, self.num_state, self.num_carry]

    @property
    def forward_avals(self) -> list[list[Any]]:
        """The types of consts, state and rows of the xs that `forward` reads."""
        return split_list(self.forward.in_avals[1:], [self.num_consts, self.num_state])

    @property
    def backward_avals(self) -> list[list[Any]]:
        """The types of consts, carry, state and rows of xs."""
        return split_list(self.backward.in_avals[1:], [self.num_consts, self.num_carry, self.num_state])

    @property
    def y_avals(self) -> list[Any]:
        """The types of rows of ys."""
        return self.backward.out_avals[self.num_carry :]


reverse_sweep_p = new_primitive("reverse_sweep")


def run_sweep(
    static: ReverseSweep,
    low: Any,
    high: Any,
    checkpoint_rows: Any,
    consts: Sequence[Any],
    init: Sequence[Any],
    saved: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Bind the primitive, as `run` does; returns carry and ys."""
    operands = [*consts, *init, *saved, *carry, *xs]
    if axes := differing([low, high, checkpoint_rows]):
        static, operands = _apart(static, axes), varying(operands, axes)
    outputs = reverse_sweep_p.bind(low, high, checkpoint_rows, *operands, **static._asdict())
    new_carry, ys = split_list(outputs, [static.num_carry])
    return new_carry, ys


def _apart(static: ReverseSweep, axes: Axes) -> ReverseSweep:
    """The sweep for devices that take different numbers of steps."""
    forward, backward = (apart(body, axes) or body for body in (static.forward, static.backward))
    return static._replace(forward=forward, backward=backward)


def sweep_abstract_eval(*_: Any, **params: Any) -> list[Any]:
    """The types of carry and ys."""
    static = ReverseSweep(**params)
    carry = static.backward.out_avals[: static.num_carry]
    return [*carry, *(stacked(aval, static.bound or 0) for aval in static.y_avals)]


def checkpointing_loop(static: ReverseSweep, body: ClosedJaxpr, num_consts: int, num_state: int) -> Loop:
    """A loop over the rows of the forward loop that saves its whole carry as that loop did."""
    return Loop(
        body,
        num_consts=num_consts,
        num_carry=num_state,
        bound=static.bound,
        reverse=static.reverse,
        predicated=False,
        unroll=static.unroll,
        storage=static.storage,
        saving=length_known(static.saving),
        saved=(True,) * num_state,
        stages=static.stages,
    )


def checkpoint_and_sweep(
    static: ReverseSweep,
    low: Any,
    high: Any,
    consts: Sequence[Any],
    init: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """The whole sweep where nothing has been saved yet: walk forward saving, then back."""
    loop = checkpointing_loop(static, static.forward, len(consts), len(init))
    out = run(loop, low, high, consts, init, xs[: static.num_forward_xs])
    (checkpoint_rows,) = out.checkpoint_rows
    return run_sweep(static, low, high, checkpoint_rows, consts, init, out.saved, carry, xs)


def sweep_dependence(eqn: Any) -> list[int]:
    """Which operands each result depends on: exact, so that a primal sweep inside another loop's body stays known."""
    static = ReverseSweep(**eqn.params)
    bits = [1 << i for i in range(len(eqn.invars))]
    window, rest = bits[0] | bits[1] | bits[2], bits[3:]
    consts, init, saved, carry, xs = split_list(rest, static.sizes)
    state = [a | b for a, b in zip(init, saved, strict=True)]
    start = 1 + static.num_consts
    inputs = [0, *consts, *state, *xs[: static.num_forward_xs]]
    state = close_over_carry(dependence(static.forward), range(start, start + static.num_state), inputs)
    needed = dependence(static.backward)
    inputs = [0, *consts, *carry, *state, *xs]
    carry_range = range(start, start + static.num_carry)
    inputs[carry_range.start : carry_range.stop] = close_over_carry(needed[: static.num_carry], carry_range, inputs)
    ys = [union(inputs, bits) for bits in needed[static.num_carry :]]
    return [window | bits for bits in (*inputs[carry_range.start : carry_range.stop], *ys)]
