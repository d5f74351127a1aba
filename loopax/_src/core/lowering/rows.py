"""How rows are walked: `lax.while_loop` over the rows of a loop, or of a part of one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.ir.annotations import UNKNOWN, Reports
from loopax._src.core.jaxpr.access_order import all_computed, reading_first
from loopax._src.core.jaxpr.accumulate import summing_in_place
from loopax._src.core.jaxpr.dependence import always_ends
from loopax._src.core.jaxpr.util import MOST_STEPS, num_bytes, weakly_cached
from loopax._src.core.masking import CommonRows, fill_inactive, fill_inactive_p, fills_now, unmasked
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    dce,
    equations_in,
    inlinable,
    inner_jaxprs,
    is_kept_for_steps,
    jaxpr_as_fun,
    keep_bits,
    replace_jaxpr,
    where,
)
from loopax._src.settings import calibration

# What follows from constants alone, computed once before a loop: XLA does that for a CPU, and for no other device.
#
# Operations that XLA fuses with what reads them stay in the loop.


class ComputedBefore(NamedTuple):
    """A body that is given some of what follows from its constants."""

    program: ClosedJaxpr  # (*consts) -> what it is given
    body: ClosedJaxpr  # (row, *consts, *what it is given, *leaves) -> results


@weakly_cached
def computed_before(body: ClosedJaxpr, num_consts: int) -> ComputedBefore | None:
    """The body (row, *consts, *leaves) without such operations; None where it has none."""
    row, *consts = body.invars[: 1 + num_consts]
    fixed, found = {*consts, *body.constvars}, list[Any]()
    for eqn in body.eqns:
        is_fixed = all(isinstance(atom, Literal) or atom in fixed for atom in eqn.invars)
        program = inlinable(eqn)
        if not is_fixed or not (always_ends(program) if program else not (eqn.effects or any(inner_jaxprs(eqn)))):
            continue
        fixed.update(eqn.outvars)
        pays = any(map(is_kept_for_steps, [eqn, *(equations_in(program) if program else ())]))
        if pays and num_bytes(v.aval for v in eqn.outvars) <= num_bytes(x.aval for x in eqn.invars):
            found.extend(eqn.outvars)
    rest = body.invars[1 + num_consts :]
    others = [eqn for eqn in body.eqns if not any(variable in found for variable in eqn.outvars)]
    given = replace_jaxpr(body, [row, *consts, *found, *rest], body.outvars, others)
    keep = [True] * (1 + num_consts) + [False] * len(found) + [True] * len(rest)
    given, used = dce(given, [True] * len(body.outvars), keep)
    found = [variable for variable, is_used in zip(found, used[1 + num_consts :], strict=False) if is_used]
    if not found:
        return None
    of_consts = [0 < i <= num_consts for i in range(len(body.invars))]
    return ComputedBefore(dce(replace_jaxpr(body, body.invars, found), [True] * len(found), of_consts)[0], given)


# Large constants of lanes, filled once for each set of active lanes instead of once in each step.
#
# What a finished lane reads of constants (`core/masking.py`) changes only when a lane finishes. So a loop whose
# body fills large constants is compiled as two nested loops: the outer one fills them for the lanes that are active
# now, and the inner one takes steps while the active lanes are still these.


# Constants of all lanes together from which on this pays (docs/benchmark-details.md); below it the additional loop
# costs more than the copies.
LARGE_CONSTANTS_BYTES = 64 * 1024


class FilledOutside(NamedTuple):
    """A body whose large constants are filled before it."""

    body: ClosedJaxpr  # (row, *consts, *filled consts, *carry, *x) -> (*carry, *y)
    activity: ClosedJaxpr  # (row, *consts, *carry) -> bool[lanes]: which lanes are active at this step
    which: tuple[int, ...]  # of the constants, in the order of the filled ones


@weakly_cached
def filled_outside(body: ClosedJaxpr, num_consts: int, num_carry: int) -> FilledOutside | None:
    """The body with its large constants filled outside; None where it fills none, or what is active is not known there.

    A body is (row, *consts, *carry, *x) -> ...; which lanes are active must follow from row, consts and the first
    `num_carry` operands behind them.
    """
    row, consts = body.invars[0], list(body.invars[1 : 1 + num_consts])
    rest = body.invars[1 + num_consts :]
    fills = [eqn for eqn in body.eqns if eqn.primitive is fill_inactive_p and fills_now(eqn)]
    fills = [eqn for eqn in fills if any(eqn.invars[2] is const for const in consts)]
    fills = [eqn for eqn in fills if eqn.invars[0] is fills[0].invars[0]]
    if num_bytes(eqn.outvars[0].aval for eqn in fills) < LARGE_CONSTANTS_BYTES or not fills:
        return None
    activity = replace_jaxpr(body, body.invars, [fills[0].invars[0]])
    activity, used = dce(activity, [True], [True] * (1 + num_consts + num_carry) + [False] * (len(rest) - num_carry))
    if any(used[1 + num_consts + num_carry :]):
        return None
    inputs = [row, *consts, *(eqn.outvars[0] for eqn in fills), *rest]
    others = [eqn for eqn in body.eqns if all(eqn is not fill for fill in fills)]
    filled = dce(replace_jaxpr(body, inputs, body.outvars, others), [True] * len(body.outvars), True)[0]
    return FilledOutside(filled, activity, tuple(consts.index(eqn.invars[2]) for eqn in fills))


class Body(NamedTuple):
    """A jaxpr (row, *consts, *leaves) -> results, as it is compiled."""

    function: Callable[..., Any]
    consts: list[Any]
    outside: FilledOutside | None = None  # then the function takes filled constants behind the constants
    common: "tuple[CommonRows, Body] | None" = None  # rows that all lanes walk, and the body there

    @classmethod
    def of(cls, closed: ClosedJaxpr, consts: list[Any], rows: CommonRows | None, num_carry: int = 0) -> "Body":
        """Of a jaxpr; which lanes are active must follow from row, consts and the first `num_carry` leaves."""
        if calibration().platform != "cpu" and (before := computed_before(closed, len(consts))):
            closed, consts = before.body, [*consts, *jaxpr_as_fun(before.program)(*consts)]
        if outside := filled_outside(closed, len(consts), num_carry):
            first = 1 + len(consts) + len(outside.which)
            return cls(_in_place(outside.body, first), consts, outside)
        common = rows and (rows, cls.plain(unmasked(closed), consts))
        return cls.plain(closed, consts)._replace(common=common)

    @classmethod
    def plain(cls, closed: ClosedJaxpr, consts: list[Any]) -> "Body":
        """Of a jaxpr that fills no constants, for all rows."""
        return cls(_in_place(closed, 1 + len(consts)), consts)

    def run(self, row: Any, *leaves: Any) -> Any:
        """The results at a row; nothing is left to fill."""
        return self.function(row, *self.consts, *leaves)

    def active(self, row: Any, carry: Sequence[Any]) -> Any:
        """Which lanes are active at this row and carry; of a body with constants to fill."""
        assert self.outside is not None
        inputs = [row, *self.consts, *carry][: len(self.outside.activity.in_avals)]
        return jaxpr_as_fun(self.outside.activity)(*inputs)[0]

    def filled(self, active: Any) -> "Body":
        """The body with its constants filled for these lanes."""
        assert self.outside is not None
        which = self.outside.which
        filled = fill_inactive(active, [self.consts[i] for i in which], [True] * len(which))
        return Body(self.function, [*self.consts, *filled])

    def at(self, row: Any) -> "Body":
        """The body at one row."""
        return self.filled(self.active(row, [])) if self.outside else self


def _in_place(body: ClosedJaxpr, first: int) -> Callable[..., Any]:
    """The body as a function, whose inputs from `first` on are changed in place where that can be."""
    return jaxpr_as_fun(reading_first(summing_in_place(body, first), first))


NEVER = -1  # a position that a loop without a limit does not reach

# (`Body.run`, row, position, carry) -> (carry, y)
Take = Callable[[Callable[..., Any], Any, Any, list[Any]], tuple[list[Any], list[Any]]]


class LoopState(NamedTuple):
    """The state of a running loop.

    The order counts: with the position first, XLA's CPU backend runs a tiny step 13 % slower.
    """

    carry: list[Any]
    ys: list[Any]  # rows already walked are written, others zero
    position: Any  # of the next step, while there is one: a row number, or one counted from elsewhere
    due: Any = None  # the position at which to report how far the loop is; None: it does not report


class Steps(NamedTuple):
    """How a loop takes steps of a body."""

    body: Body
    take: Take
    # Positions count the steps of such a walk from the row `start`; None: they are rows.
    ahead: "RowLoop | None" = None
    start: Any = None
    written: Callable[[Any], Any] | None = None  # the row of ys that a position writes; None: its own row

    def row_of(self, position: Any) -> Any:
        """The row of a position."""
        return position if self.ahead is None else self.ahead.advance(self.start, position)

    def limits(self, rows: CommonRows) -> Sequence[Any]:
        """The first position in these rows, and the one behind the last."""
        if (ahead := self.ahead) is None:
            return rows
        found = [None if row is None else ahead.distance(self.start, row) + int(ahead.reverse) for row in rows]
        return found[::-1] if ahead.reverse else found

    def of_opposites(self) -> "Steps":
        """Steps that are given the opposites of positions."""
        ahead, written, take = self.ahead or RowLoop(reverse=False), self.written, self.take
        return Steps(
            self.body,
            lambda body, row, position, carry: take(body, row, -position, carry),
            ahead._replace(reverse=not ahead.reverse),
            jnp.int32(0) if self.start is None else self.start,
            written and (lambda position: written(-position)),
        )


class Watch(NamedTuple):
    """How a running loop reports how far it is."""

    reports: Reports
    start: Any  # the first position
    lanes: int | None  # which leaf of the carry is the number of lanes that go on

    def first_due(self, walk: "RowLoop") -> Any:
        """The position of the first report."""
        return self._after(walk, self.start, self.reports.first)

    def next_due(self, walk: "RowLoop", state: LoopState) -> Any:
        """Where to report next; reports where that is now."""
        active = jnp.int32(UNKNOWN) if self.lanes is None else jnp.sum(state.carry[self.lanes], dtype=jnp.int32)

        def now(position: Any, active: Any, _: Any) -> Any:
            return self._after(walk, position, self.reports.report(walk.distance(self.start, position), active))

        return lax.cond(state.position == state.due, now, lambda _, __, due: due, state.position, active, state.due)

    def _after(self, walk: "RowLoop", position: Any, steps: Any) -> Any:
        room = position + 1 if walk.reverse else MOST_STEPS - position
        due = walk.advance(position, jnp.minimum(steps, room))
        return due if walk.limited else jnp.where(due == MOST_STEPS, NEVER, due)


class RowLoop(NamedTuple):
    """How to walk: which way, how many steps at a time, and whether the carry may stop it."""

    reverse: bool
    unroll: int = 1
    predicated: bool = False
    limited: bool = True  # False: only the predicate stops it, and the position has no meaning
    watch: "Watch | None" = None  # how the loop reports; None: it does not
    length_known: bool = True  # by XLA, where limits are constants

    def first(self, low: Any, high: Any) -> Any:
        """The row of the first step."""
        return high - 1 if self.reverse else low

    def advance(self, position: Any, steps: Any) -> Any:
        """The position so many steps on."""
        return position - steps if self.reverse else position + steps

    def following(self, position: Any) -> Any:
        """The position of the next step; without a limit, it stays at the largest in the end."""
        return self.advance(position, 1 if self.limited else (position < MOST_STEPS).astype(jnp.int32))

    def distance(self, start: Any, position: Any) -> Any:
        """Steps from one position to another."""
        return start - position if self.reverse else position - start

    def run(self, steps: Steps, state: LoopState, end: Any, begins: Any = None) -> LoopState:
        """Walk until the position is `end` (the first that is not walked), or the predicate is False.

        `begins`: whether there is a first step, for a caller that knows it otherwise, in fewer kernels.

        A loop that reports walks in stretches of many steps, each until a report is due.
        """
        if self.watch is None:
            return self._run(steps, state, end, begins)
        watch, nearer = self.watch, jnp.maximum if self.reverse else jnp.minimum

        def until_due(state: LoopState) -> LoopState:
            due = watch.next_due(self, state)
            stop = nearer(due, end) if self.limited else due
            return self._run(steps, state._replace(due=None), stop)._replace(due=due)

        return lax.while_loop(self._replace(watch=None)._enough(end, 1), until_due, state)

    def _run(self, steps: Steps, state: LoopState, end: Any, begins: Any = None) -> LoopState:
        if self.reverse:  # XLA knows the length of a loop that counts up, and not of one that counts down
            up = self._replace(reverse=False)
            state = up._run(steps.of_opposites(), state._replace(position=-state.position), -end)
            return state._replace(position=-state.position)
        body = steps.body
        if body.outside is not None:
            # Two nested loops: fill constants for the active lanes, and take steps while these are the active lanes.
            enough = self._enough(end, 1)

            def stretch(state: LoopState) -> LoopState:
                active = body.active(steps.row_of(state.position), state.carry)

                def goes_on(later: LoopState) -> Any:
                    return enough(later) & jnp.all(body.active(steps.row_of(later.position), later.carry) == active)

                return lax.while_loop(goes_on, self._several(steps, body.filled(active), 1), state)

            return lax.while_loop(enough, stretch, state)
        # Bodies to take one after another, each until its own end: rows that all lanes walk have their own body.
        parts = [(body, end)]
        if body.common is not None:
            rows, common = body.common
            first, last = steps.limits(rows)
            parts = [] if first is None else [(body, jnp.minimum(first, end))]
            parts += [(common, end)] if last is None else [(common, jnp.minimum(last, end)), (body, end)]
        for part, stop in parts:
            for size in [self.unroll, 1] if self.unroll > 1 else [1]:
                goes_on, several = self._enough(stop, size), self._several(steps, part, size)
                if self.length_known and not self.predicated:
                    state = lax.while_loop(goes_on, several, state)
                else:
                    state = while_asked(goes_on, several, state, begins if len(parts) == self.unroll == 1 else None)
        return state

    def run_at_most_once(self, steps: Steps, state: LoopState, end: Any) -> LoopState:
        """Run a loop of one step or none, as a condition: XLA would move what is constant out of a loop."""
        return lax.cond(self._enough(end, 1)(state), self._several(steps, steps.body, 1), lambda state: state, state)

    def run_and_discard(self, steps: Steps, state: LoopState, end: Any) -> LoopState:
        """Compute the step of a loop of one step or none, and drop it where it is not taken.

        XLA fuses it with what is around the loop, as it does not with a condition.
        """
        is_taken = self._enough(end, 1)(state)
        carry, ys = steps.take(steps.body.run, state.position, state.position, state.carry)
        new = LoopState(carry, [y[None] for y in ys], self.advance(state.position, 1))
        return jax.tree.map(partial(where, is_taken), new, state)

    def _enough(self, end: Any, size: int) -> Callable[[LoopState], Any]:
        """Whether `size` steps remain, and the predicate holds."""
        last = self.advance(end, -(size - 1))  # compared with as it is: tiny loops feel a subtraction

        def goes_on(state: LoopState) -> Any:
            enough = state.position > last if self.reverse else state.position < last
            if not self.predicated:
                return enough
            if self.limited:
                return state.carry[0] & enough
            # The position stays at the largest in the end, where nothing is reported any more.
            return state.carry[0] & (state.position != end) if self.watch is not None else state.carry[0]

        return goes_on

    def _several(self, steps: Steps, body: Body, size: int) -> Callable[[LoopState], LoopState]:
        """Take `size` steps of this body."""

        def several(state: LoopState) -> LoopState:
            carry, buffers, position, _ = state
            for _ in range(size):
                row = steps.row_of(position)
                carry, y = steps.take(body.run, row, position, carry)
                row = row if steps.written is None else steps.written(position)
                buffers = [write(buffer, row, value) for buffer, value in zip(buffers, y, strict=True)]
                position = self.following(position)
            return LoopState(carry, buffers, position)

        return several


def while_asked(goes_on: Callable[[Any], Any], step: Callable[[Any], Any], state: Any, begins: Any = None) -> Any:
    """`lax.while_loop` of a length that XLA does not know.

    Where the host looks at the condition, a step computes it, which takes no kernel of its own. `begins` is that of the
    first step, if the caller has it.
    """
    if not calibration().look:
        return lax.while_loop(goes_on, step, state)

    def step_and_ask(at: tuple[Any, Any]) -> tuple[Any, Any]:
        later = step(at[1])
        return goes_on(later), later

    return lax.while_loop(lambda at: at[0], step_and_ask, (goes_on(state) if begins is None else begins, state))[1]


def read(array: Any, row: Any) -> Any:
    """One row; row numbers here are never negative, so JAX need not check."""
    index = partial(lax.dynamic_index_in_dim, axis=0, keepdims=False, allow_negative_indices=False)
    return keep_bits(index, array, row)


def write(array: Any, row: Any, value: Any) -> Any:
    """The array with one row replaced, in place where it stands in a loop's state."""
    update = partial(lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False)
    return keep_bits(update, array, value, row)


def stored_first(stored: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Arrays in which values are stored, and these values, which a loop then changes in place."""
    computed = all_computed([*stored, *values], values)
    return computed[: len(stored)], computed[len(stored) :]


def put(array: Any, row: Any, writes: Any, value: Any) -> Any:
    """The array with one row replaced if `writes`."""
    return write(array, row, where(writes, value, read(array, row)))
