"""The temporary memory that a program needs, predicted from its jaxpr.

A model of how XLA lays out buffers, on a CPU at least: elementwise operations are fused into those that use them and
write nothing; a loop's carry stands in one place, which is that of its start where nothing else needs the start, and
that of the program's result where it is returned; slices are updated in place; a buffer is free again after its last
use. The temporary memory is the most that is in use at one time, without the arguments and the results of the program
(`temp_size_in_bytes` of `memory_analysis()`).
"""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax

from loopax._src.core import row_buffers as buffers
from loopax._src.core.autodiff.sweep_transpose import linear_sweep_p
from loopax._src.core.batching.compact import compact_vmap_p
from loopax._src.core.effects import only_if_p
from loopax._src.core.ir.linear_loop import linear_loop_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.ir.reverse_sweep import reverse_sweep_p
from loopax._src.core.jaxpr.util import bind_again, evaluate, num_bytes
from loopax._src.core.masking import active_p, fill_inactive_p
from loopax._src.frontend.raising import of_user
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    as_open,
    branches,
    called,
    dce,
    equation_context,
    invars_of,
    is_cond,
    is_costly,
    is_lax_loop,
    is_of_jax,
    lax_loop,
    moves,
    outvars_of,
    renames,
    stands_alone,
    takes_fused,
    updates,
    user_lines,
)

# A program with loopax's operations spelled out in JAX's own, and without calls.


_OURS = {
    loop_p,
    reverse_sweep_p,
    linear_loop_p,
    linear_sweep_p,
    compact_vmap_p,
    active_p,
    only_if_p,
    fill_inactive_p,
    *buffers.VERSION,
}


def unfolded(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Write a program as one list of JAX's operations, without dead code. Bodies of loops stay as they are."""
    return _evaluated(closed, _operation)


def without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inline the calls of a program. Operations of loopax stay as they are."""
    return _evaluated(closed, _call)


def _evaluated(closed: ClosedJaxpr, equation: Callable[[Any, list[Any]], Sequence[Any]]) -> ClosedJaxpr:
    """A program that evaluates another, without dead code."""
    flat = jax.make_jaxpr(lambda *inputs: evaluate(closed, inputs, equation))(*closed.in_avals)
    return dce(flat, [True] * len(flat.out_avals), True)[0]


def _operation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    if eqn.primitive in _OURS:
        program = jax.make_jaxpr(partial(eqn.primitive.impl, **eqn.params))(*operands)
        return evaluate(program, operands, _operation)
    inner = called(eqn)
    return bind_again(eqn, operands) if inner is None else evaluate(inner, operands, _operation)


def _call(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    inner = called(eqn)
    if inner is None:
        return bind_again(eqn, operands)
    return evaluate(inner, operands, _call, _line_of_call if is_of_jax(inner) else _own_line)


def _line_of_call(_: Any) -> AbstractContextManager[None]:
    """Of an equation in a call of a function of JAX."""
    return nullcontext()


def _own_line(eqn: Any) -> AbstractContextManager[None]:
    """Of an equation that has one, else that of the call: JAX drops lines where it traces custom derivatives."""
    return equation_context(eqn) if any(of_user(user_lines(eqn))) else nullcontext()


# Which values of a program XLA writes to memory, and which only live inside of a fused operation.


def is_fusible(eqn: Any) -> bool:
    """Whether an equation may be computed inside of another."""
    return not (takes_fused(eqn) or stands_alone(eqn) or renames(eqn))


def fused_into(eqns: Sequence[Any], users: Mapping[Any, Sequence[int]], results: Container[Any]) -> list[set[int]]:
    """For each equation, the places of those inside of which it is computed; its own where its results are written.

    `users` are the places of the equations that use a variable, `results` those that the program returns.
    """
    found: list[set[int]] = [set() for _ in eqns]
    for place in reversed(range(len(eqns))):
        eqn = eqns[place]
        using = [other for variable in eqn.outvars for other in users.get(variable, ())]
        takers = [other for other in using if is_fusible(eqns[other]) or takes_fused(eqns[other])]
        into = set().union(*(found[other] for other in takers))
        is_written = (
            not is_fusible(eqn)
            or len(takers) < len(using)
            or any(variable in results for variable in eqn.outvars)
            or (len(into) > 1 and is_costly(eqn))
        )
        found[place] = {place} if is_written or not into else into
    return found


def variables(eqn: Any) -> list[Any]:
    """What an equation reads, constants apart."""
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


@dataclass(eq=False)
class _Buffer:
    """A piece of memory. Times are places of equations."""

    size: int
    since: int
    until: int
    is_ours: bool = True  # not that of an argument, of a result, or of the loop around


def temporary_bytes(closed: ClosedJaxpr) -> int:
    """The temporary bytes of a program that is compiled."""
    return _Layout(closed, {}).most()


class _Layout:
    """The buffers of a program, or of the body of a loop in it."""

    def __init__(self, closed: ClosedJaxpr, carried: Mapping[int, int]) -> None:
        """`carried` says which input a result of a loop's body becomes: both stand in one place, outside."""
        jaxpr = as_open(unfolded(closed))
        self.eqns = jaxpr.eqns
        self.numbers: dict[Any, list[int]] = {}  # of a result: which ones of the program it is
        for number, atom in enumerate(jaxpr.outvars):
            if not isinstance(atom, Literal):
                self.numbers.setdefault(atom, []).append(number)
        self.users: dict[Any, list[int]] = {}
        for place, eqn in enumerate(self.eqns):
            for variable in variables(eqn):
                self.users.setdefault(variable, []).append(place)
        self.fused = fused_into(self.eqns, self.users, self.numbers.keys())
        # What is fused reads its operands when the operation runs that it is part of.
        self.parts: dict[int, list[int]] = {}
        for part, into in enumerate(self.fused):
            for place in into:
                self.parts.setdefault(place, []).append(part)
        self.last_read = {v: max(max(self.fused[p]) for p in places) for v, places in self.users.items()}
        self.needs = _ancestors(self.eqns)
        self.inputs = {result: jaxpr.invars[given] for result, given in carried.items()}
        self.buffers: list[_Buffer] = []
        self.buffer_of: dict[Any, _Buffer | None] = {  # None: it cannot be written over
            variable: _Buffer(_size(variable), -1, -1, is_ours=False) for variable in self.inputs.values()
        }
        # XLA writes nothing over the results of a loop, whatever needs them.
        self.of_loops = {v for eqn in filter(is_lax_loop, self.eqns) for v in eqn.outvars}
        self.inside = [self._run(place, eqn) for place, eqn in enumerate(self.eqns)]
        self._note_last_uses()

    def most(self) -> int:
        """The bytes at the fullest moment."""
        changes = [0] * (len(self.eqns) + 1)
        for buffer in self.buffers:
            if buffer.is_ours:
                changes[buffer.since] += buffer.size
                changes[min(buffer.until + 1, len(self.eqns))] -= buffer.size
        held = accumulate(changes)
        return max((inside + ours for inside, ours in zip(self.inside, held, strict=False)), default=0)

    def _run(self, place: int, eqn: Any) -> int:
        """Give the results of an equation their buffers; returns the bytes that it needs meanwhile."""
        if is_lax_loop(eqn):
            return self._run_loop(place, eqn)
        if is_cond(eqn):
            for variable in eqn.outvars:
                self._write(place, variable)
            return max(_Layout(branch, {}).most() for branch in branches(eqn))
        if renames(eqn) or (updates(eqn) and self._may_change(place, eqn.invars[0])):
            self.buffer_of[eqn.outvars[0]] = self._buffer(eqn.invars[0])
        elif place in self.fused[place]:
            for variable in eqn.outvars:
                self._write(place, variable, over=self._read_last_by(place) if is_fusible(eqn) else [])
        return 0

    def _run_loop(self, place: int, eqn: Any) -> int:
        loop = lax_loop(eqn)
        assert loop is not None
        inputs, outputs = invars_of(loop.body), outvars_of(loop.body)
        for i, result in enumerate(eqn.outvars):
            start = eqn.invars[loop.carry_start + i] if i < loop.num_carry else None
            if start is None:
                self._write(place, result)
            elif outputs[i] is inputs[loop.num_consts + i]:  # as it came
                self.buffer_of[result] = self._buffer(start)
            else:
                self._carry(place, start, result)
        return _Layout(loop.body, {i: loop.num_consts + i for i in range(loop.num_carry)}).most()

    def _carry(self, place: int, start: Any, result: Any) -> None:
        """One place for the start of a leaf and its end."""
        buffer = self._buffer(start) if self._may_change(place, start) else None
        if self._goes_outside(place, result):
            if buffer is not None:
                buffer.is_ours = False  # the start is written to where the result is wanted
            self.buffer_of[result] = None
        else:
            self.buffer_of[result] = buffer or self._new(place, result)

    def _write(self, place: int, variable: Any, over: list[Any] | None = None) -> None:
        """A buffer for a result: the one that is wanted outside, of what is read for the last time, or a new one."""
        if self._goes_outside(place, variable):
            self.buffer_of[variable] = None
            return
        same = (old for old in over or [] if old.aval.shape == variable.aval.shape and _size(old) == _size(variable))
        old = next((old for old in same if self._is_free_after(place, old)), None)
        self.buffer_of[variable] = self._new(place, variable) if old is None else self._buffer(old)

    def _new(self, place: int, variable: Any) -> _Buffer:
        buffer = _Buffer(_size(variable), place, place)
        self.buffers.append(buffer)
        return buffer

    def _buffer(self, atom: Any) -> _Buffer | None:
        return None if isinstance(atom, Literal) else self.buffer_of.get(atom)

    def _may_change(self, place: int, atom: Any) -> bool:
        """Whether an operation that changes an operand in place may do so without a copy."""
        return self._buffer(atom) is not None and self._comes_last(place, atom)

    def _comes_last(self, place: int, variable: Any) -> bool:
        """Whether an operation needs all others that read a variable: XLA decides on copies before it orders them.

        What is fused into it reads element by element, as it writes.
        """

        def is_earlier(user: int) -> bool:
            if place in self.fused[user]:
                return self._reads_as_it_writes(place, user, variable)
            return all(self.needs[place] >> other & 1 for other in self.fused[user])

        return all(map(is_earlier, self.users.get(variable, ())))

    def _reads_as_it_writes(self, place: int, user: int, variable: Any) -> bool:
        eqn = self.eqns[user]
        if user == place and not is_fusible(eqn):
            return is_lax_loop(eqn) or (updates(eqn) and eqn.invars[0] is variable)
        return eqn.outvars[0].aval.shape == variable.aval.shape and not moves(eqn)

    def _is_free_after(self, place: int, variable: Any) -> bool:
        """Whether the buffer of an operand may be taken by a result."""
        is_ours = self._buffer(variable) is not None and variable not in self.of_loops
        return is_ours and self.last_read[variable] <= place

    def _read_last_by(self, place: int) -> list[Any]:
        """What the operation at a place, with all that is fused into it, is the last to read."""
        parts = [variable for part in self.parts[place] for variable in variables(self.eqns[part])]
        return [variable for variable in parts if self.last_read[variable] == place]

    def _goes_outside(self, place: int, variable: Any) -> bool:
        """Whether a value is written to where a result of the program stands, which nothing else needs any more."""
        numbers = self.numbers.get(variable, [])
        given = [self.inputs.get(number) for number in numbers]
        return bool(numbers) and (given[0] is None or self._comes_last(place, given[0]))

    def _note_last_uses(self) -> None:
        for variable, buffer in self.buffer_of.items():
            if buffer is not None:
                end = len(self.eqns) if variable in self.numbers else self.last_read.get(variable, -1)
                buffer.until = max(buffer.until, end)


def _ancestors(eqns: Sequence[Any]) -> list[int]:
    """For each equation, the set of those that it needs, as bits."""
    made: dict[Any, int] = {}
    found: list[int] = []
    for place, eqn in enumerate(eqns):
        needed = 0
        for variable in variables(eqn):
            needed |= made.get(variable, 0)
        found.append(needed)
        made.update((variable, needed | 1 << place) for variable in eqn.outvars)
    return found


def _size(variable: Any) -> int:
    return num_bytes([variable.aval])
