"""What both ways to compile a reverse sweep have in common."""

from collections.abc import Callable, Sequence
from sys import maxsize
from typing import Any, NamedTuple

from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.cost import arithmetic, classified, hoisted_part, without_recomputed
from loopax._src.core.jaxpr.narrow import narrow
from loopax._src.core.jaxpr.util import flatten, num_bytes, split_list, trace, weakly_cached
from loopax._src.core.lowering.rows import Body, RowLoop, Steps, read
from loopax._src.core.masking import active_p, common_rows
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    happens,
    jaxpr_as_fun,
    num_equations,
    partial_eval_jaxpr,
    replace_jaxpr,
)
from loopax._src.settings import calibration, costs

# The step of a reverse sweep in two parts: one that walks ahead and records residuals, and one that walks back.
#
# A replay that stores states has to evaluate each step once more for its derivative. One that stores residuals has
# not: they are all that the derivative needs. The sweep records residuals where these have room where states would be
# stored.


class Recording(NamedTuple):
    """The two parts of a step, and what is the same at every step."""

    ahead: ClosedJaxpr  # (row, *consts, *state, *forward x) -> (*state, *record)
    hoisted: ClosedJaxpr | None  # consts -> residuals that are the same at every step
    back: ClosedJaxpr  # (row, *consts, *hoisted, *carry, *record, *x) -> (*carry, *y)
    places: tuple[int, ...] | None  # the leaf of the state in whose slots each leaf of a record fits; None: not all do


@weakly_cached
def recording_of(sweep: ReverseSweep) -> Recording | None:
    """How the sweep records residuals; None: it stores states, for residuals take more room, or lanes are masked."""
    states = num_bytes(sweep.forward_avals.state)
    room = max(states, sweep.saving.record_bytes)
    recording = None if sweep.inverse or states == maxsize else in_two_parts(sweep, True)
    if recording is None or (recording.places is None and sweep.saving.reuses_room):
        return None
    # It pays where records have room, and save more than a tenth of what it costs to store states, and more than they
    # cost. A record that is no larger than a state is stored in its place, so it costs nothing more.
    record = num_bytes(recording.ahead.out_avals[sweep.num_state :])
    saved = arithmetic(sweep.backward) - arithmetic(recording.back)
    pays = record <= room and saved >= costs().cached_byte * (0.1 * states + max(record - states, 0))
    return recording if pays else None


@weakly_cached
def _halves(sweep: ReverseSweep) -> tuple[ClosedJaxpr, ClosedJaxpr] | None:
    """The equations of a step before those that read the carry or the other rows; and these. None: not told apart.

    Before: (row, *consts, *carry, *state, *forward x, *other x) -> (*carry, *state, *y).
    After: (row, *consts, *state, *forward x) -> (*state, *residuals), (*residuals, *carry, *other x) -> (*carry, *y).

    Equations are left whole: JAX has evaluated a transposed step partially (`core/autodiff/transpose.py`). Where one
    gives the next state, too (a guard of all that a batch does), JAX does it once more.
    """
    row, *inputs = sweep.step.invars
    given, outputs = sweep.of_backward(inputs), sweep.step_outputs(sweep.step.outvars)
    others, ends = given.xs[sweep.num_forward_xs :], [*outputs.carry, *outputs.ys]
    later, ahead, back = {*given.carry, *others}, list[Any](), list[Any]()
    for eqn in sweep.step.eqns:
        is_ahead = later.isdisjoint(_variables(eqn.invars))
        (ahead if is_ahead else back).append(eqn)
        later.update(() if is_ahead else eqn.outvars)
    if later.isdisjoint(_variables(outputs.state)):
        read = dict.fromkeys([*(x for eqn in back for x in _variables(eqn.invars)), *_variables(ends)])
        residuals = [x for x in read if x not in later and x not in sweep.step.constvars]
        known = replace_jaxpr(sweep.step, [row, *sweep.forward_inputs(given)], [*outputs.state, *residuals], ahead)
        return known, replace_jaxpr(sweep.step, [*residuals, *given.carry, *others], ends, back)
    unknown = [False] * (1 + sweep.num_consts) + [True] * sweep.num_carry
    unknown += [False] * (sweep.num_state + sweep.num_forward_xs) + [True] * len(others)
    wanted = [True] * sweep.num_carry + [False] * sweep.num_state + [True] * len(sweep.y_avals)
    known, rest, found = partial_eval_jaxpr(sweep.step, unknown, wanted)
    return (known, rest) if found == wanted else None


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


@weakly_cached
def in_two_parts(sweep: ReverseSweep, stored: bool) -> Recording | None:
    """The parts of a step; None: they cannot be told apart. A record that is not `stored` is used at once."""
    asks_for_active = any(eqn.primitive is active_p for eqn in sweep.step.eqns)
    if asks_for_active or (not stored and num_bytes(sweep.step.in_avals) == maxsize):
        return None
    # Effects happen on the way back, in the order of its steps, and not in replays: such a step stays whole.
    if happens(sweep.step.effects) or (halves := _halves(sweep)) is None:
        return None
    num_consts, num_state, num_xs = sizes = [sweep.num_consts, sweep.num_state, sweep.num_forward_xs]
    known, later = halves
    _, of_consts, _, of_xs = split_list(known.invars, [1, num_consts, num_state])
    of_residuals = later.in_avals[: len(known.out_avals) - num_state]
    narrowed = narrow(known, num_state, of_residuals, free=[*of_consts, *of_xs])
    known = narrowed.known

    # Where each residual comes from on the way back: consts and xs (hoisted, forwarded), the record of the step, or it
    # is computed from these again. Positions are those among the outputs of `known`.
    residuals = classified(known, sizes, range(num_state, len(known.out_avals)))
    constant = [r.position for r in residuals if r.hoisted]
    is_row = lambda r: known.outvars[r.position] is known.invars[0]  # noqa: E731
    of_steps = [r.position for r in residuals if not r.hoisted and r.forwarded is None and not is_row(r)]
    first_x = 1 + num_consts + num_state
    given = [*range(1 + num_consts), *range(first_x, first_x + num_xs)]
    left, recompute = without_recomputed(known, given, [*constant, *(of_steps if stored else [])], constant)
    hoisted = [p for p in constant if p in left]
    recorded = [p for p in of_steps if p in left] if stored else of_steps
    again = [p for p in (*constant, *of_steps) if p not in (*hoisted, *recorded)]

    of_hoisted, of_record = ([known.out_avals[p] for p in positions] for positions in (hoisted, recorded))
    consts, _, carry, xs = sweep.backward_avals
    # `front` are the rows of xs that the forward body reads.
    avals = [consts, of_hoisted, carry, of_record, xs[:num_xs], xs[num_xs:]]

    def back(row: Any, *operands: Any) -> list[Any]:
        consts, of_hoisted, carry, of_record, front, others = split_list(operands, list(map(len, avals[:-1])))
        values = dict(zip((*hoisted, *recorded), (*of_hoisted, *of_record), strict=True))
        if recompute is not None:
            more = jaxpr_as_fun(recompute)(row, *consts, *front, *(values[p] for p in left))
            values.update(zip(again, more, strict=True))
        read = [values.get(r.position, row) if r.forwarded is None else front[r.forwarded] for r in residuals]
        return jaxpr_as_fun(later)(*narrowed.repeated(read), *carry, *others)

    # For each leaf of a record, a leaf of the state of the same type; each is taken at most once.
    free, places = list(enumerate(sweep.forward_avals.state)), list[int]()
    for aval in of_record:
        if found := next((item for item in free if item[1] == aval), None):
            free.remove(found)
            places.append(found[0])
    return Recording(
        replace_jaxpr(known, known.invars, [*known.outvars[:num_state], *(known.outvars[p] for p in recorded)]),
        hoisted_part(known, num_consts, hoisted),
        trace(back, [sweep.step.in_avals[0], *flatten(avals)]),
        tuple(places) if len(places) == len(of_record) else None,
    )


# Equations of a step from which on a sweep with slots holds it once for all that is evaluated again, in general and
# where a step stores little. With fewer, two loops are faster than one that writes in each step (docs/how-it-works.md).
LONG_STEP, LONG_STEP_OF_SMALL = 300, 50
SMALL_BYTES = 4096


class Track(NamedTuple):
    """The rows of the forward loop, by the number of steps from the first one."""

    first_row: Any  # the first row
    num_steps: Any
    ahead: RowLoop  # how the forward loop walked

    def row(self, step: Any) -> Any:
        """The row of a step."""
        return self.ahead.advance(self.first_row, step)

    def step(self, row: Any) -> Any:
        """The step of a row."""
        return self.ahead.distance(self.first_row, row)


Run = Callable[..., list[Any]]  # `Body.run`


class Bodies(NamedTuple):
    """What a sweep evaluates.

    A replay stores something before each step, which the way back reads: the state, or a record of residuals.
    """

    sweep: ReverseSweep
    xs: list[Any]
    forward: Body
    replay: Body
    backward: Body
    stored_avals: Sequence[Any]
    records: bool  # what is stored is a record, and nothing is left to evaluate on the way back
    places: Sequence[int]  # in which leaves of the slots each leaf of what is stored has its place
    in_one_loop: bool  # the program holds once what is evaluated again, to compile it sooner or to begin fewer loops

    def step(self, body: Run, row: Any, state: list[Any]) -> tuple[list[Any], list[Any]]:
        """The next state, and what is stored; `body` is the `run` of `forward` or `replay`."""
        out = body(row, *state, *(read(x, row) for x in self.xs[: self.sweep.num_forward_xs]))
        num_state = self.sweep.num_state
        return out[:num_state], out[num_state:] if self.records else state

    def back(self, body: Run, row: Any, carry: list[Any], stored: list[Any]) -> tuple[list[Any], list[Any]]:
        """The carry after a step back, and its row of ys; `body` is the `run` of `backward`."""
        out = self.sweep.outputs(body(row, *carry, *stored, *(read(x, row) for x in self.xs)))
        return list(out.carry), list(out.ys)

    def replay_steps(self, ahead: RowLoop, start: Any, written: Callable[[Any], Any]) -> Steps:
        """The steps of a replay from the row `start`; a position stores in the row that `written` says."""
        return Steps(self.replay, lambda body, row, _, state: self.step(body, row, state), ahead, start, written)


def bodies_of(sweep: ReverseSweep, consts: list[Any], xs: list[Any], recorded: Recording | None) -> Bodies:
    """The bodies of a sweep, as they are compiled. `recorded` says how it records residuals; None: it stores states."""
    replay, backward, hoisted = sweep.forward, sweep.backward, list[Any]()
    stored, places = sweep.forward_avals.state, range(sweep.num_state)
    if recorded is not None:
        replay, backward, places = recorded.ahead, recorded.back, recorded.places or ()
        hoisted = jaxpr_as_fun(recorded.hoisted)(*consts) if recorded.hoisted else []
        stored = replay.out_avals[sweep.num_state :]
    rows = common_rows(sweep.backward, consts)
    forward, ahead = (Body.of(body, consts, rows) for body in (sweep.forward, replay))
    back, is_plain = Body.of(backward, [*consts, *hoisted], rows), ahead.outside is None and rows is None
    stored_bytes = num_bytes(stored)
    enough = min(LONG_STEP, LONG_STEP_OF_SMALL) if stored_bytes <= SMALL_BYTES else LONG_STEP
    is_one = is_plain and (num_equations(replay) >= enough or calibration().begins_late(stored_bytes))
    return Bodies(sweep, xs, forward, ahead, back, stored, recorded is not None, places, is_one)
