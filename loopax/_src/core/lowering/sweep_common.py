"""What both ways to compile a reverse sweep have in common."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from loopax._src.core.ir.loop import EMPTY_SLOT
from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.util import num_equations, split_list
from loopax._src.core.lowering.active_sets import FilledOutside, active_of, filled_outside
from loopax._src.core.lowering.recording import Recording
from loopax._src.core.lowering.while_loop import Common, RowLoop, Step, Steps, read
from loopax._src.core.masking.all_active import CommonRows, common_rows, unmasked
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun

# Equations of a step from which on a sweep with slots holds it once for all that is evaluated again. With fewer, it is
# faster to run two loops than to decide in each step what to store (docs/how-it-works.md).
LONG_STEP = 300


class Track(NamedTuple):
    """The rows of the forward loop, by the number of steps from the first one."""

    first_row: Any  # the first row
    num_steps: Any
    ahead: RowLoop  # how the forward loop walked

    @classmethod
    def of(cls, sweep: ReverseSweep, low: Any, high: Any, checkpoint_rows: Any) -> "Track":
        """From the window of rows, and where the forward loop saved."""
        ahead = RowLoop(sweep.reverse, sweep.unroll)
        first_row = checkpoint_rows[0]
        num_steps = jnp.maximum(ahead.distance(first_row, low - 1 if sweep.reverse else high), 0)
        return cls(first_row, jnp.where(first_row == EMPTY_SLOT, 0, num_steps), ahead)

    def row(self, step: Any) -> Any:
        """The row of a step."""
        return self.ahead.advance(self.first_row, step)

    def step(self, row: Any) -> Any:
        """The step of a row."""
        return self.ahead.distance(self.first_row, row)


RowOf = Callable[[Any], Any]  # position -> row
Run = Callable[..., list[Any]]  # a body


class Body(NamedTuple):
    """One of the two bodies of a sweep; the rows of xs are inside."""

    run: Callable[..., Any]  # (row, consts, *leaves in groups) -> results in groups
    consts: list[Any]
    outside: FilledOutside | None  # large constants are filled outside of `run`, which takes them behind the constants
    common: tuple[CommonRows, Callable[..., Any]] | None  # rows that all lanes walk, and the body there
    num_equations: int

    def once(self, row: Any, *groups: Any) -> Any:
        """What the body returns at one row."""
        if self.outside is None:
            return self.run(row, self.consts, *groups)
        outside, consts = self.outside, self.consts
        filled, _ = outside.at(consts, lambda row: active_of(outside, consts, row, []), row)
        return self.run(row, filled, *groups)

    def steps(
        self,
        make: Callable[[Callable[..., Any], RowOf], Callable[[Sequence[Any]], Step]],
        ahead: RowLoop,
        start: Any,
        written: RowOf | None = None,
    ) -> Steps:
        """Steps whose positions count from the row `start`; `make` is told the row of a position.

        A position writes its row of ys, or the one `written` says.
        """

        def row_of(position: Any) -> Any:
            return ahead.advance(start, position)

        steps = Steps(make(self.run, row_of), self.consts, written or row_of)
        if self.outside is not None:
            outside, consts = self.outside, self.consts
            active_at = lambda state: active_of(outside, consts, row_of(state.position), [])  # noqa: E731
            return steps._replace(per_active_set=partial(outside.at, consts, active_at))
        if self.common is None:
            return steps
        rows, run = self.common
        return steps._replace(common=Common(make(run, row_of), *_positions(rows, ahead, start)))


class Bodies(NamedTuple):
    """What a sweep evaluates.

    A replay stores something before each step, which the way back reads: the state, or a record of residuals.
    """

    forward: Body  # (row, consts, state) -> state
    replay: Body  # (row, consts, state) -> (state, stored)
    backward: Body  # (row, consts, carry, stored) -> (carry, y)
    stored_avals: Sequence[Any]
    records: bool  # what is stored is a record, and nothing is left to evaluate on the way back
    places: Sequence[int]  # in which leaves of the slots each leaf of what is stored has its place

    @property
    def replay_is_long(self) -> bool:
        """Whether the step of a replay takes so long to compile that a program should hold it once."""
        plain = self.replay.outside is None and self.replay.common is None
        return plain and self.replay.num_equations >= LONG_STEP

    def replay_steps(self, ahead: RowLoop, start: Any, written: RowOf) -> Steps:
        """The steps of a replay from the row `start`; a position stores in the row that `written` says."""

        def make(replay: Callable[..., Any], row_of: RowOf) -> Callable[[Sequence[Any]], Step]:
            return lambda consts: lambda position, state: replay(row_of(position), consts, state)

        return self.replay.steps(make, ahead, start, written)


def _positions(rows: CommonRows, ahead: RowLoop, start: Any) -> tuple[Any, Any]:
    """The first position and the one behind the last."""

    def position(row: Any) -> Any:
        return None if row is None else ahead.distance(start, row) + int(ahead.reverse)

    low, high = position(rows.low), position(rows.high)
    return (high, low) if ahead.reverse else (low, high)


def bodies_of(sweep: ReverseSweep, consts: list[Any], xs: list[Any], recorded: Recording | None) -> Bodies:
    """The bodies of a sweep, as they are compiled. `recorded` says how it records residuals; None: it stores states."""
    rows = common_rows(sweep.backward, consts)

    def forward(body: Run, row: Any, consts: Sequence[Any], state: list[Any]) -> list[Any]:
        return body(row, *consts, *state, *(read(x, row) for x in xs[: sweep.num_forward_xs]))

    def storing_state(body: Run, row: Any, consts: Sequence[Any], state: list[Any]) -> tuple[list[Any], list[Any]]:
        return forward(body, row, consts, state), state

    def recording(body: Run, row: Any, consts: Sequence[Any], state: list[Any]) -> tuple[list[Any], list[Any]]:
        state, record = split_list(forward(body, row, consts, state), [sweep.num_state])
        return state, record

    def backward(
        body: Run, row: Any, consts: Sequence[Any], carry: list[Any], stored: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        out = sweep.outputs(body(row, *consts, *carry, *stored, *(read(x, row) for x in xs)))
        return list(out.carry), list(out.ys)

    def compiled(closed: ClosedJaxpr, run: Callable[..., Any], consts: list[Any] = consts) -> Body:
        outside = filled_outside(closed, len(consts), 0)
        body = outside.body if outside else closed
        common = None if rows is None else (rows, partial(run, unmasked(closed)))
        return Body(partial(run, jaxpr_as_fun(body)), consts, outside, common, num_equations(closed.jaxpr))

    ahead = compiled(sweep.forward, forward)
    if recorded is None:
        states = sweep.forward_avals.state
        replay, back = compiled(sweep.forward, storing_state), compiled(sweep.backward, backward)
        return Bodies(ahead, replay, back, states, False, range(len(states)))
    hoisted = jaxpr_as_fun(recorded.hoisted)(*consts) if recorded.hoisted else []
    replay, back = compiled(recorded.ahead, recording), compiled(recorded.back, backward, [*consts, *hoisted])
    return Bodies(ahead, replay, back, recorded.record_avals(sweep.num_state), True, recorded.places or ())
