"""The temporary memory that a program needs, predicted from its jaxpr.

A model of how XLA lays out buffers, on a CPU at least: elementwise operations are fused into those that use them and
write nothing; a loop's carry stands in one place, which is that of its start where nothing else needs the start, and
that of the program's result where it is returned; slices are updated in place; a buffer is free again after its last
use. The temporary memory is the most that is in use at one time, without the arguments and the results of the program
(`temp_size_in_bytes` of `memory_analysis()`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.insight.fusion import fused_into, is_fusible, variables
from loopax._src.insight.unfold import unfolded
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    branches,
    is_cond,
    is_lax_loop,
    lax_loop,
    moves,
    renames,
    updates,
)


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
        jaxpr = unfolded(closed).jaxpr
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
        inputs, outputs = loop.body.jaxpr.invars, loop.body.jaxpr.outvars
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
