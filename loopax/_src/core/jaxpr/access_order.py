"""Rows of an array are read before others are written in their place.

XLA on a CPU copies the whole array in each step of a loop where it might write some elements before it has read
others. It knows no order of operations but that of their operands. So a write is given what was read as an operand::

    Before: y = scatter(x, i, rows);  r = gather(x, j)
    After:  r = gather(x, [j, j])[0];  y = scatter(x, i if r is there, rows)

A branch or a loop in the body that writes rows counts as a write, and waits in the same way.

And of a single block XLA computes the read again in each operation that uses it, which may be after the write. So
two are read where one is needed.

On a GPU or a TPU, XLA also copies an array that is stored and changed in the same step, if it changes it first.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import jax
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.util import bind_again, evaluate, num_bytes, trace, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, Literal, equations_in, inner_jaxprs, map_programs
from loopax._src.settings import calibration

# A smaller array is copied within the time of an operation.
_MIN_ELEMENTS = 2048

_COPIED_BYTES = 2**20  # a copy of as many takes longer than a kernel more


def _writes_rows(eqn: Any) -> bool:
    if not jaxi.updates(eqn) or not jaxi.may_be_updated(aval := eqn.invars[0].aval):
        return False
    return prod(aval.shape) >= max(_MIN_ELEMENTS, 4 * prod(jaxi.update_of(eqn).aval.shape))


def _written_by(eqn: Any) -> list[Any]:
    """The arrays of which an equation writes rows, itself or in a program of its own: a branch, or a loop."""
    if _writes_rows(eqn):
        return [] if isinstance(eqn.invars[0], Literal) else [eqn.invars[0]]
    if not any(map(writes_rows, inner_jaxprs(eqn))):
        return []
    results = {variable.aval for variable in eqn.outvars}
    variables = dict.fromkeys(x for x in eqn.invars if not isinstance(x, Literal))
    return [x for x in variables if x.aval in results and prod(x.aval.shape) >= _MIN_ELEMENTS]


@weakly_cached
def writes_rows(program: ClosedJaxpr) -> bool:
    """Whether a program writes a small part of a large array."""
    return any(map(_writes_rows, equations_in(program)))


def all_computed(values: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Values that XLA computes before it uses any of them, so that it does not copy `arrays`, if these are large.

    On a CPU it would copy them all the same. Nothing is done to values on the host.
    """
    values = list(values)
    if calibration().platform == "cpu" or num_bytes(map(jax.typeof, arrays)) < _COPIED_BYTES:
        return values
    alike = dict[frozenset[Any], list[int]]()  # JAX would make what is the same on all devices vary with the others
    for i, x in enumerate(values):
        if not jaxi.is_on_host(jax.typeof(x)):
            alike.setdefault(jaxi.varying_axes(x), []).append(i)
    for which in alike.values():
        for i, x in zip(which, lax.optimization_barrier([values[i] for i in which]), strict=True):
            values[i] = x
    return values


def reading_first(body: ClosedJaxpr, first: int) -> ClosedJaxpr:
    """The body of a loop, or of a branch, whose inputs from `first` on may be changed in place.

    It is the same body where all reads come before the writes as it is, and on a GPU or a TPU: compiled for an H100,
    programs have as many copies with this order as without it.
    """
    return _reading_first(body, first) or body if calibration().platform == "cpu" else body


@weakly_cached
def _reading_first(body: ClosedJaxpr, first: int) -> ClosedJaxpr | None:
    if not writes_rows(body):
        return None
    inlined = lambda eqn: program if (program := jaxi.called(eqn)) and writes_rows(program) else None  # noqa: E731
    is_changed = False

    def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        nonlocal is_changed
        new = _with_inner(eqn)
        is_changed |= new is not eqn
        return bind_again(new, operands)

    order = _Order(trace(lambda *inputs: evaluate(body, inputs, equation, inlined=inlined), body.in_avals), first)
    return order.program() if order.late or is_changed else None


def _with_inner(eqn: Any) -> Any:
    """A branch, or a loop of JAX, whose own programs read first."""
    if jaxi.is_cond(eqn) or jaxi.is_scan(eqn) or jaxi.is_while(eqn):
        return map_programs(eqn, lambda program: reading_first(program, 0))
    return eqn


class _Order:
    """The order of the equations of a program."""

    def __init__(self, closed: ClosedJaxpr, first: int) -> None:
        self.closed, self.eqns = closed, closed.eqns
        makers = {variable: k for k, eqn in enumerate(self.eqns) for variable in eqn.outvars}
        # Of each equation, those that it needs.
        self.needs = [
            {makers[v] for v in eqn.invars if not isinstance(v, Literal) and v in makers} for eqn in self.eqns
        ]
        acting = [k for k, eqn in enumerate(self.eqns) if eqn.effects]  # their order stays
        for k, after in pairwise(acting):
            self.needs[after].add(k)
        self.late: dict[int, list[int]] = {}  # of a write, the reads that nothing else keeps in front of it
        self.returned = {v for v in closed.outvars if not isinstance(v, Literal)}
        for variable in dict.fromkeys(v for eqn in self.eqns for v in _written_by(eqn)):
            if (variable in makers or variable in closed.invars[first:]) and variable not in self.returned:
                self._put_in_order(variable)

    def _put_in_order(self, variable: Any) -> None:
        users = [k for k, eqn in enumerate(self.eqns) if any(v is variable for v in eqn.invars)]
        writes = [k for k in users if variable in _written_by(self.eqns[k])]
        reads = [k for k in users if jaxi.reads_blocks(self.eqns[k]) and self.eqns[k].invars[0] is variable]
        if len(writes) > 1 or len(writes) + len(reads) < len(users):
            return
        (write,) = writes
        before = self._all_before(write)
        late = [read for read in reads if not self._serves_only(read, write, before)]
        # A read at a place that depends on the write, or that must come after it, is of a copy.
        for read in late:
            if write not in self._all_before(read):
                self.needs[write].add(read)
                self.late.setdefault(write, []).append(read)

    def _all_before(self, k: int) -> set[int]:
        found, new = set(), {k}
        while new:
            new = set().union(*(self.needs[i] for i in new)) - found
            found |= new
        return found

    def _serves_only(self, read: int, write: int, before: set[int]) -> bool:
        """Whether what is read goes nowhere but into a write."""
        reached = {read}
        for k in range(len(self.eqns)):
            if k != write and (k == read or self.needs[k] & reached):
                if k not in before or not self.returned.isdisjoint(self.eqns[k].outvars):
                    return False
                reached.add(k)
        return True

    def program(self) -> ClosedJaxpr:
        """The program in this order."""
        order: dict[int, None] = {}

        def visit(k: int) -> None:
            if k not in order:
                for needed in sorted(self.needs[k]):
                    visit(needed)
                order[k] = None

        for k in range(len(self.eqns)):
            visit(k)
        sorted_program = jaxi.replace_jaxpr(self.closed, eqns=[self.eqns[k] for k in order])
        late = {id(self.eqns[write]): [self.eqns[read] for read in reads] for write, reads in self.late.items()}
        reads, found = {id(eqn) for eqns in late.values() for eqn in eqns}, {}

        def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            if id(eqn) in reads:
                found[id(eqn)] = jaxi.read_twice(eqn, operands)
                return [found[id(eqn)]]
            if id(eqn) in late:
                operands = jaxi.written_after(eqn, operands, [found[id(read)] for read in late[id(eqn)]])
            return bind_again(eqn, operands)

        return trace(lambda *inputs: evaluate(sorted_program, inputs, equation), self.closed.in_avals)
