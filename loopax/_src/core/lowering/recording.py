"""The step of a reverse sweep in two parts: one that walks ahead and records residuals, and one that walks back.

A replay that stores states has to evaluate each step once more for its derivative. One that stores residuals has not:
they are all that the derivative needs. The sweep records residuals where these have room where states would be stored.
"""

from collections.abc import Sequence
from sys import maxsize
from typing import Any, NamedTuple

from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.cost import arithmetic
from loopax._src.core.jaxpr.costs import costs
from loopax._src.core.jaxpr.residuals import Residual, classified, hoisted_part, without_recomputed
from loopax._src.core.jaxpr.util import num_bytes, split_list, trace, weakly_cached
from loopax._src.core.masking.all_active import asks_for_active
from loopax._src.jax_internals import ClosedJaxpr, Literal, happens, jaxpr_as_fun, partial_eval_jaxpr, replace_jaxpr

# If more is handed over than so many times the state, leaving out what can be recomputed will not make it fit.
MANY = 4


class Recording(NamedTuple):
    """The two parts of a step, and what is the same at every step."""

    ahead: ClosedJaxpr  # (row, *consts, *state, *forward x) -> (*state, *record)
    hoisted: ClosedJaxpr | None  # consts -> residuals that are the same at every step
    back: ClosedJaxpr  # (row, *consts, *hoisted, *carry, *record, *x) -> (*carry, *y)
    places: tuple[int, ...] | None  # the leaf of the state in whose slots each leaf of a record fits; None: not all do

    def record_avals(self, num_state: int) -> list[Any]:
        """The types of what is recorded of a step."""
        return self.ahead.out_avals[num_state:]


def recording_of(sweep: ReverseSweep) -> Recording | None:
    """How the sweep records residuals; None: it stores states, for residuals take more room, or lanes are masked."""
    recording = None if sweep.inverse else _recording(sweep)
    if recording is None:
        return None
    fits = recording.places is not None or not sweep.saving.reuses_room
    return recording if fits else None


@weakly_cached
def _recording(sweep: ReverseSweep) -> Recording | None:
    states = num_bytes(sweep.forward_avals.state)
    room = max(states, sweep.saving.record_bytes)
    if states == maxsize or asks_for_active(sweep.step) or _handed_over(sweep) > MANY * room:
        return None
    recording = _in_two_parts(sweep, stored=True)
    return recording if recording is not None and _pays(sweep, recording, room) else None


@weakly_cached
def in_two_parts(sweep: ReverseSweep) -> Recording | None:
    """The parts of a step whose record is used at once, and never stored; None: they cannot be told apart."""
    if asks_for_active(sweep.step) or num_bytes(sweep.step.in_avals) == maxsize:
        return None
    return _in_two_parts(sweep, stored=False)


def _in_two_parts(sweep: ReverseSweep, stored: bool) -> Recording | None:
    split = _split(sweep)
    if split is None:
        return None
    known, later = split
    num_consts, num_state, num_xs = sizes = [sweep.num_consts, sweep.num_state, sweep.num_forward_xs]
    residuals = classified(known, sizes, range(num_state, len(known.out_avals)))
    constant = [r.position for r in residuals if r.hoisted]
    of_steps = [r.position for r in residuals if _is_stored(known, r)]
    first_x = 1 + num_consts + num_state
    given = [*range(1 + num_consts), *range(first_x, first_x + num_xs)]
    left, recompute = without_recomputed(known, given, [*constant, *(of_steps if stored else [])], constant)
    hoisted = [p for p in constant if p in left]
    recorded = [p for p in of_steps if p in left] if stored else of_steps
    again = [p for p in (*constant, *of_steps) if p not in (*hoisted, *recorded)]
    parts = _Parts(known, later, residuals, hoisted, recorded, again, left, recompute)
    outputs = known.jaxpr.outvars
    return Recording(
        replace_jaxpr(known, known.jaxpr.invars, [*outputs[:num_state], *(outputs[p] for p in recorded)]),
        hoisted_part(known, num_consts, hoisted),
        _back(sweep, parts),
        _places(sweep.forward_avals.state, [known.out_avals[p] for p in recorded]),
    )


def _handed_over(sweep: ReverseSweep) -> int:
    """How many bytes the way back reads of what is computed ahead from states: found faster than by splitting."""
    inputs = sweep.step.jaxpr.invars
    from_state = set(sweep.of_backward(inputs[1:]).state)
    later = {*sweep.of_backward(inputs[1:]).carry, *inputs[sweep.xs_range.start + sweep.num_forward_xs :]}
    handed_over = set()
    for eqn in sweep.step.jaxpr.eqns:
        read = {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        if read & later:
            handed_over |= read & from_state
            later.update(eqn.outvars)
        elif read & from_state:
            from_state.update(eqn.outvars)
    return num_bytes(variable.aval for variable in handed_over)


def _pays(sweep: ReverseSweep, recording: Recording, room: int) -> bool:
    """Whether records have room, and save more than a tenth of what it costs to store states, and more than they cost.

    A record that is no larger than a state is stored in its place, so it costs nothing more.
    """
    states, record = (num_bytes(of) for of in (sweep.forward_avals.state, recording.record_avals(sweep.num_state)))
    saved = arithmetic(sweep.backward) - arithmetic(recording.back)
    return record <= room and saved >= costs().cached_byte * (0.1 * states + max(record - states, 0))


class _Parts(NamedTuple):
    """The two parts of a step, and where each residual of the second comes from."""

    known: ClosedJaxpr  # (row, *consts, *state, *forward x) -> (*state, *residuals)
    later: ClosedJaxpr  # (*residuals, *carry, *other x) -> (*carry, *y)
    residuals: Sequence[Residual]
    hoisted: Sequence[int]  # positions among the outputs of `known`
    recorded: Sequence[int]
    recomputed: Sequence[int]
    left: Sequence[int]  # from which these are computed
    recompute: ClosedJaxpr | None  # (row, *consts, *forward x, *left) -> recomputed


def _split(sweep: ReverseSweep) -> tuple[ClosedJaxpr, ClosedJaxpr] | None:
    """JAX's partial evaluation of the step, where the carry and the rows that only the way back reads are unknown.

    None where the step has effects: these happen on the way back, in the order of its steps, and not in replays.
    """
    if happens(sweep.step.effects):
        return None
    num_back_xs = len(sweep.xs_range) - sweep.num_forward_xs
    unknown = [False] * (1 + sweep.num_consts) + [True] * sweep.num_carry + [False] * sweep.num_state
    unknown += [False] * sweep.num_forward_xs + [True] * num_back_xs
    outputs = [True] * sweep.num_carry + [False] * sweep.num_state + [True] * len(sweep.y_avals)
    known, later, found = partial_eval_jaxpr(sweep.step, unknown, outputs)
    return (known, later) if found == outputs else None


def _is_stored(known: ClosedJaxpr, residual: Residual) -> bool:
    is_row = known.jaxpr.outvars[residual.position] is known.jaxpr.invars[0]
    return not residual.hoisted and residual.forwarded is None and not is_row


def _back(sweep: ReverseSweep, parts: _Parts) -> ClosedJaxpr:
    """The part that walks back: it finds the residuals in consts, xs and records, or computes them from these."""
    expected, types = sweep.backward_avals, parts.known.out_avals
    of_hoisted = [types[p] for p in parts.hoisted]
    of_record = [types[p] for p in parts.recorded]
    sizes = [sweep.num_consts, len(of_hoisted), sweep.num_carry, len(of_record)]

    def body(row: Any, *operands: Any) -> list[Any]:
        consts, hoisted, carry, record, xs = split_list(operands, sizes)
        front, back = split_list(xs, [sweep.num_forward_xs])
        found = dict(zip((*parts.hoisted, *parts.recorded), (*hoisted, *record), strict=True))
        if parts.recompute is not None:
            left = [found[p] for p in parts.left]
            again = jaxpr_as_fun(parts.recompute)(row, *consts, *front, *left)
            found.update(zip(parts.recomputed, again, strict=True))

        def value(residual: Residual) -> Any:
            return found.get(residual.position, row) if residual.forwarded is None else front[residual.forwarded]

        values = [value(residual) for residual in parts.residuals]
        return jaxpr_as_fun(parts.later)(*values, *carry, *back)

    avals = [*expected.consts, *of_hoisted, *expected.carry, *of_record, *expected.xs]
    return trace(body, [sweep.step.in_avals[0], *avals])


def _places(state: Sequence[Any], record: Sequence[Any]) -> tuple[int, ...] | None:
    """For each leaf of a record, a leaf of the state of the same type; each is taken at most once."""
    free, places = list(enumerate(state)), []
    for aval in record:
        found = next((item for item in free if item[1] == aval), None)
        if found is None:
            return None
        free.remove(found)
        places.append(found[0])
    return tuple(places)
