"""The reverse sweep: a loop that walks backward and reads states that a forward loop has passed.

The states are not stored. `saved` holds the state at the start of every block of the forward loop;
block by block, from the last to the first, the states of one block are evaluated again and then read::

    for block in reversed(blocks):
        state = saved[block]
        for row in block:                 # all but the last, in the forward direction
            states[row] = state
            state = forward(row, consts, state, xs[row])
        for row in reversed(block):
            carry, ys[row] = backward(row, consts, carry, states[row], xs[row])

Operands are `low, high, *consts, *init, *saved, *carry, *xs`, results `*carry, *ys`. As a function,
a replay depends on the forward loop's `init`; `saved` is what that loop saved on its way, and has no
derivative of its own in reverse mode. The primitive is closed under differentiation: a derivative of
a replay is a replay of the derivative of both parts, so second derivatives store no more than
first ones do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._compat import ClosedJaxpr, Primitive, jaxpr_as_fun, mlir, zeros
from loopax.core.dependence import close_over_carry, dependence, dependence_rules, union
from loopax.core.jaxprs import split, stacked, weakly_cached
from loopax.core.lending import Lent, in_stretches, lend_in_body
from loopax.core.lowering import Progress, Step, Steps, Walk, read, write
from loopax.core.storage import Storage


class Replay(NamedTuple):
    """The static description of a reverse sweep."""

    forward: ClosedJaxpr  # (row, *consts, *state, *forward x) -> state
    backward: ClosedJaxpr  # (row, *consts, *carry, *state, *x) -> (*carry, *y)
    num_consts: int
    num_state: int
    num_carry: int
    num_forward_xs: int  # the first xs are what `forward` reads; `backward` reads all
    bound: int | None
    block: int
    reverse: bool  # the direction of `forward`
    unroll: int
    storage: Storage  # what reverse mode through the sweep stores
    lent: Lent | None = None  # a batch: constants that both bodies expect to be lent already

    @property
    def sizes(self) -> list[int]:
        """Lengths of consts, init, saved and carry among the operands, for `split`."""
        return [self.num_consts, self.num_state, self.num_state, self.num_carry]

    @property
    def forward_avals(self) -> list[list[Any]]:
        """The types of consts, state and rows of the xs that `forward` reads."""
        return split(self.forward.in_avals[1:], [self.num_consts, self.num_state])

    @property
    def backward_avals(self) -> list[list[Any]]:
        """The types of consts, carry, state and rows of xs."""
        return split(self.backward.in_avals[1:], [self.num_consts, self.num_carry, self.num_state])

    @property
    def y_avals(self) -> list[Any]:
        """The types of rows of ys."""
        return self.backward.out_avals[self.num_carry :]


replay_p = Primitive("loop_replay")
replay_p.multiple_results = True


@weakly_cached
def _lending(static: Replay) -> Replay:
    assert static.lent is not None
    forward, backward = (lend_in_body(body, static.lent) for body in (static.forward, static.backward))
    return static._replace(forward=forward, backward=backward, lent=None)


def lending_replay(static: Replay) -> Replay:
    """The sweep with bodies that do their own lending."""
    return static if static.lent is None else _lending(static)


def replay(
    static: Replay,
    low: Any,
    high: Any,
    consts: Sequence[Any],
    init: Sequence[Any],
    saved: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Bind the primitive; returns carry and ys."""
    outputs = replay_p.bind(low, high, *consts, *init, *saved, *carry, *xs, **static._asdict())
    new_carry, ys = split(outputs, [static.num_carry])
    return new_carry, ys


def _abstract(*_: Any, **params: Any) -> list[Any]:
    static = Replay(**params)
    carry = static.backward.out_avals[: static.num_carry]
    return [*carry, *(stacked(aval, static.bound or 0) for aval in static.y_avals)]


replay_p.def_abstract_eval(_abstract)


class Sweep(NamedTuple):
    """The state of a running reverse sweep."""

    block: Any  # the number of the block whose turn it is
    states: list[Any]  # room for the states of one block
    progress: Progress  # the backward walk


def _run(low: Any, high: Any, *operands: Any, **params: Any) -> list[Any]:
    static = Replay(**params)
    consts, _, saved, carry, xs = split(operands, static.sizes)
    ahead = Walk(static.reverse, static.unroll)
    first, num_steps = ahead.first(low, high), jnp.maximum(high - low, 0)
    bodies = _bodies(static, consts, xs)

    def one_block(sweep: Sweep) -> Sweep:
        start = ahead.advance(first, sweep.block * static.block)
        length = jnp.minimum(num_steps - sweep.block * static.block, static.block)
        state = [read(s, sweep.block) for s in saved]
        states = _states_of_block(ahead, bodies, start, length, state, sweep.states)
        progress = _walk_back(ahead, bodies, start, length, states, sweep.progress)
        return Sweep(sweep.block - 1, states, progress)

    states = [zeros(stacked(aval, static.block)) for aval in static.forward_avals[1]]
    ys = [zeros(stacked(aval, static.bound or 0)) for aval in static.y_avals]
    last_block = (num_steps + (static.block - 1)) // static.block - 1
    sweep = Sweep(last_block, states, Progress(carry, ys, low))
    sweep = lax.while_loop(lambda sweep: sweep.block >= 0, one_block, sweep)
    return [*sweep.progress.carry, *sweep.progress.ys]


class Bodies(NamedTuple):
    """Both bodies as functions of row, constants and state; the rows of xs are inside."""

    forward: Any  # (row, consts, state) -> state
    backward: Any  # (row, consts, carry, state) -> (carry, y)
    consts: list[Any]
    lent: Lent | None

    def lend_at(self, row_of: Any) -> Any:
        """How constants are lent, if they are; which lanes are active depends on the row alone."""
        if self.lent is None:
            return None
        activity = jaxpr_as_fun(self.lent.activity)
        return in_stretches(self.lent, self.consts, lambda p: activity(row_of(p.position), *self.consts)[0])


def _bodies(static: Replay, consts: list[Any], xs: list[Any]) -> Bodies:
    forward_body, backward_body = jaxpr_as_fun(static.forward), jaxpr_as_fun(static.backward)
    forward_xs = xs[: static.num_forward_xs]

    def forward(row: Any, consts: Sequence[Any], state: list[Any]) -> list[Any]:
        return forward_body(row, *consts, *state, *(read(x, row) for x in forward_xs))

    def backward(row: Any, consts: Sequence[Any], carry: list[Any], state: list[Any]) -> Any:
        out = backward_body(row, *consts, *carry, *state, *(read(x, row) for x in xs))
        carry, y = split(out, [static.num_carry])
        return carry, y

    return Bodies(forward, backward, consts, static.lent)


def _states_of_block(
    ahead: Walk, bodies: Bodies, start: Any, length: Any, state: list[Any], states: list[Any]
) -> list[Any]:
    """Evaluate the states of one block again, into `states`; the last state needs no step after it."""

    def row_of(position: Any) -> Any:
        return ahead.advance(start, position)

    def with_consts(consts: Sequence[Any]) -> Step:
        return lambda position, state: (bodies.forward(row_of(position), consts, state), state)

    steps = Steps(with_consts, bodies.consts, lend=bodies.lend_at(row_of))
    progress = Progress(state, states, jnp.int32(0))
    progress = Walk(reverse=False, unroll=ahead.unroll).run(steps, progress, length - 1)
    return [write(s, length - 1, value) for s, value in zip(progress.ys, progress.carry, strict=True)]


def _walk_back(ahead: Walk, bodies: Bodies, start: Any, length: Any, states: list[Any], progress: Progress) -> Progress:
    """Walk one block backward.

    Positions count from the block's start: XLA then has one number less to carry into every fused
    operation, which decides whether a tiny loop is compiled as one function.
    """

    def row_of(position: Any) -> Any:
        return ahead.advance(start, position)

    def with_consts(consts: Sequence[Any]) -> Step:
        def step(position: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
            return bodies.backward(row_of(position), consts, carry, [read(s, position) for s in states])

        return step

    steps = Steps(with_consts, bodies.consts, row_of, bodies.lend_at(row_of))
    progress = progress._replace(position=length - 1)
    return Walk(reverse=True, unroll=ahead.unroll).run(steps, progress, jnp.int32(-1))


_run_compiled = jax.jit(_run, static_argnames=Replay._fields)
replay_p.def_impl(_run_compiled)
mlir.register_lowering(replay_p, mlir.lower_fun(_run, multiple_results=True))


def _dependence(eqn: Any) -> list[int]:
    """Exact, so that a primal sweep inside another loop's body stays known."""
    static = lending_replay(Replay(**eqn.params))
    bits = [1 << i for i in range(len(eqn.invars))]
    window, rest = bits[0] | bits[1], bits[2:]
    consts, init, saved, carry, xs = split(rest, static.sizes)
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


dependence_rules[replay_p] = _dependence
