"""Arrays that a lane which has finished keeps as its own, in the body of a loop that goes on for others.

Such a lane is given the operands of one that is still active, and what it computes is thrown away
(`core/masking.py`). Both touch all of an array. But of an array of which a step reads and writes some rows, it is
enough that the rows which a finished lane reads are an active one's, and that it writes none::

    Before: x, c = filled(x), filled(c);  new = x.at[c].set(x[c] + 1);  new = where(active, new, x)
    After:  c = filled(c);  row = filled(x[c]);  new = x.at[where(active, c, beyond)].set(row + 1)

Here is found which inputs of a body are such arrays, through its branches, calls and loops. What is said of one value:
it is a *version* of an input, the whole of it with some rows written, or a *view*, a part that was read.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.loop import LoopInputs
from loopax._src.core.jaxpr.accumulate import carried_by, summing_in_place
from loopax._src.core.jaxpr.util import Mask, weakly_cached
from loopax._src.core.row_buffers import VERSION
from loopax._src.jax_internals import ClosedJaxpr, Literal, Primitive

# A view that is a larger part of an array is filled as fast as the array.
_LARGEST_PART = 1 / 4


class Own(NamedTuple):
    """A value of a finished lane's own."""

    root: int  # the input of the program of which it is a version or a view
    is_version: bool


class Taken(NamedTuple):
    """What an equation takes of a lane's own: the other operands are filled."""

    operands: Mask
    results: tuple[Own | None, ...]  # what is a lane's own of its results


class OwnValues(NamedTuple):
    """What is a lane's own in a program."""

    of: dict[Any, Own]  # by variables
    taken: dict[int, Taken]  # by the identity of equations
    outputs: tuple[Own | None, ...]
    strays: frozenset[int]  # inputs of which all, or much, is filled somewhere


@weakly_cached
def own_values(closed: ClosedJaxpr, own: Mask) -> OwnValues:
    """What is a lane's own in a program if these of its inputs are."""
    of = {variable: Own(i, True) for i, (variable, is_own) in enumerate(zip(closed.invars, own, strict=True)) if is_own}
    taken, strays = {}, set()
    find = lambda atom: None if isinstance(atom, Literal) else of.get(atom)  # noqa: E731
    for eqn in closed.eqns:
        given = tuple(map(find, eqn.invars))
        if any(given):
            taken[id(eqn)] = found = _taken(eqn, given)
            for atom, value, is_taken in zip(eqn.invars, given, found.operands, strict=True):
                if value and not is_taken and not _is_part(atom.aval, closed.in_avals[value.root]):
                    strays.add(value.root)
            of |= {variable: value for variable, value in zip(eqn.outvars, found.results, strict=True) if value}
    return OwnValues(of, taken, tuple(map(find, closed.outvars)), frozenset(strays))


def _is_part(aval: Any, whole: Any) -> bool:
    return prod(aval.shape) <= _LARGEST_PART * prod(whole.shape)


def _taken(eqn: Any, given: Sequence[Own | None]) -> Taken:
    operands, results = [False] * len(given), [None] * len(eqn.outvars)
    versions = [value if value and value.is_version else None for value in given]
    if eqn.primitive in VERSION or jaxi.can_write_nothing(eqn):
        operands[0], results[VERSION.get(eqn.primitive, 0)] = versions[0] is not None, versions[0]
    elif jaxi.is_select(eqn):
        if None not in versions[1:] and len(set(versions[1:])) == 1:
            operands[1:], results[0] = [True] * len(versions[1:]), versions[1]
    elif jaxi.is_sum(eqn):
        i = 0 if versions[0] else 1
        if versions[i] and not given[1 - i] and eqn.invars[i].aval.shape == eqn.outvars[0].aval.shape:
            operands[i], results[0] = True, versions[i]
    elif jaxi.takes_part(eqn):
        operands[0], results[0] = given[0] is not None, given[0] and given[0]._replace(is_version=False)
    elif inner := inner_of(eqn):
        own, roots = inner.settled([False if at is None else versions[at] is not None for at in inner.operands])
        for at, is_own in zip(inner.operands, own, strict=True):
            if is_own:
                operands[at] = True
        for output, root in roots.items():
            results[inner.results[output]] = versions[inner.operands[root]]
    return Taken(tuple(operands), tuple(results))


class Inner(NamedTuple):
    """The programs in an equation: branches, a call, or the bodies of a loop."""

    programs: Sequence[ClosedJaxpr]
    operands: Sequence[int | None]  # of the equation, one for each input; None: it may not be a lane's own
    results: dict[int, int]  # of the equation, by outputs of the programs that may be a lane's own
    carried: dict[int, int] | None = None  # of a loop, the output that each leaf of the carry (an input) has become

    def settled(self, own: Sequence[bool]) -> tuple[Mask, dict[int, int]]:
        """Which of these inputs stay a lane's own, and by outputs that are versions the inputs of which they are."""
        while True:
            padded = (*own, *[False] * max(len(program.in_avals) for program in self.programs))
            found = [own_values(program, padded[: len(program.in_avals)]) for program in self.programs]
            roots = {
                k: root
                for k in self.results
                if (root := self._root([values.outputs[k] for values in found])) is not None
            }
            lost = set().union(*(values.strays for values in found))
            for values in found:
                versions = ((k, value) for k, value in enumerate(values.outputs) if value and value.is_version)
                lost |= {value.root for k, value in versions if roots.get(k) != value.root}
            if self.carried is not None:
                lost |= {i for i, k in self.carried.items() if roots.get(k) != i}
                lost |= {i for k, i in roots.items() if self.carried.get(i) != k}
            if not any(own[i] for i in lost):
                return tuple(own), roots
            own = [is_own and i not in lost for i, is_own in enumerate(own)]

    @staticmethod
    def _root(values: Sequence[Own | None]) -> int | None:
        first, *others = values
        return first.root if first and first.is_version and all(value == first for value in others) else None


def kept_by_lanes(body: ClosedJaxpr, mapped: LoopInputs) -> tuple[Mask, Mask]:
    """Which inputs of the body of a batch finished lanes keep as their own, and which leaves of the carry are theirs.

    The body is (row, *consts, *carry, *x) -> (*carry, *y); `mapped` says which inputs have lanes.
    """
    first = 1 + len(mapped.consts)
    carried = {first + k: k for k in range(len(mapped.carry))}
    inner = Inner([body], range(len(body.in_avals)), _alike(len(mapped.carry)), carried)
    own, _ = inner.settled([False, *mapped.consts, *mapped.carry, *(False for _ in mapped.xs)])
    return own, own[first : first + len(mapped.carry)]


class Walk(NamedTuple):
    """Where the body of a loop of ours stands in an equation: operands are `*limits, *consts, *others`."""

    steps: Any  # the class of its parameters, which have `num_consts` and `inverse`
    body: str  # the name of the body, (row, *consts, *others) -> results
    num_limits: int
    inverse_is_alike: bool  # whether its inverse has the inputs of the body, and the carry as outputs


walks: dict[Primitive, Walk] = {}  # of each loop of ours (`core/rules.py`)


def body_of(eqn: Any) -> ClosedJaxpr:
    """The body of a loop of ours, which adds up in place what it adds to its carry."""
    walk = walks[eqn.primitive]
    loop = walk.steps(**eqn.params)
    return summing_in_place(getattr(loop, walk.body), 1 + loop.num_consts)


def _alike(number: int) -> dict[int, int]:
    return {k: k for k in range(number)}


def inner_of(eqn: Any) -> Inner | None:
    """The programs in an equation of control flow, or of a call; None if it is neither, or nobody knows."""
    if jaxi.is_cond(eqn):
        return Inner(jaxi.branches(eqn), range(1, len(eqn.invars)), _alike(len(eqn.outvars)))
    if program := jaxi.inlinable(eqn):
        return Inner([program], range(len(eqn.invars)), _alike(len(eqn.outvars)))
    operands: list[int | None] = []
    if loop := jaxi.lax_loop(eqn):
        operands += [None] * len(loop.body.in_avals)
        operands[: loop.carry_range.stop] = range(loop.num_cond_consts, loop.num_cond_consts + loop.carry_range.stop)
        if loop.cond is not None:  # whether it goes on, a lane asks of what is an active lane's
            asked = {atom for eqn in loop.cond.eqns for atom in eqn.invars if not isinstance(atom, Literal)}
            for i, leaf in zip(loop.carry_range, loop.cond.invars[loop.num_cond_consts :], strict=True):
                operands[i] = None if leaf in asked or leaf in loop.cond.outvars else operands[i]
        return Inner([loop.body], operands, _alike(loop.num_carry), {i: k for k, i in enumerate(loop.carry_range)})
    if eqn.primitive not in walks:
        return None
    walk, body = walks[eqn.primitive], body_of(eqn)
    loop, leaves = walk.steps(**eqn.params), list(carried_by[eqn.primitive](eqn))
    operands += [None] * len(body.in_avals)
    if walk.inverse_is_alike or loop.inverse is None:
        operands[1 : 1 + loop.num_consts] = range(walk.num_limits, walk.num_limits + loop.num_consts)
    for leaf in leaves:
        operands[leaf.input] = leaf.operand
    results = {leaf.output: leaf.result for leaf in leaves}
    programs = [body] if loop.inverse is None or not walk.inverse_is_alike else [body, loop.inverse]
    return Inner(programs, operands, results, {leaf.input: leaf.output for leaf in leaves})
