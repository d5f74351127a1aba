"""Arrays that a lane which has finished keeps as its own, in the body of a loop that goes on for others.

Such a lane is given the operands of one that is still active, and what it computes is thrown away
(`core/masking.py`). Both touch all of an array. But of an array of which a step reads and writes some rows, it is
enough that the rows which a finished lane reads are an active one's, and that it writes none::

    Before: x, c = filled(x), filled(c);  new = x.at[c].set(x[c] + 1);  new = where(active, new, x)
    After:  c = filled(c);  row = filled(x[c]);  new = x.at[where(active, c, beyond)].set(row + 1)

Here is found which inputs of a body are such arrays, through its branches, calls and loops. What is said of one value:
it is a *version* of an input, the whole of it with some rows written, or a *view*, a part that was read.
"""

from collections.abc import Callable, Sequence, Set
from math import prod
from typing import Any, NamedTuple

from loopax._src import jax_internals as jaxi
from loopax._src.core.buffer_versions import buffers, read_only
from loopax._src.core.ir.loop import LoopInputs
from loopax._src.core.jaxpr.accumulate import branch_in_place, carried_by, is_large, summing_in_place
from loopax._src.core.jaxpr.dependence import mixed_inputs
from loopax._src.core.jaxpr.util import Mask, either, weakly_cached
from loopax._src.core.row_buffers import VERSION
from loopax._src.jax_internals import ClosedJaxpr, Literal, Primitive

# Of smaller arrays, those of all lanes together, all is filled and chosen from within the time that rows take.
_MIN_ELEMENTS = 512

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
    sizes = prod(aval.shape), prod(whole.shape)
    is_known = all(isinstance(size, int) for size in sizes)  # not with a symbolic dimension (of `jax.export`)
    return is_known and sizes[0] <= _LARGEST_PART * sizes[1]


def _taken(eqn: Any, given: Sequence[Own | None]) -> Taken:
    operands = [False] * len(given)
    results: list[Own | None] = [None] * len(eqn.outvars)
    versions = [value if value and value.is_version else None for value in given]
    if eqn.primitive in VERSION or jaxi.can_write_nothing(eqn):
        operands[0], results[VERSION.get(eqn.primitive, 0)] = versions[0] is not None, versions[0]
    elif jaxi.is_select(eqn) and None not in versions[1:] and len(set(versions[1:])) == 1:
        operands[1:], results[0] = [True] * len(versions[1:]), versions[1]
    elif jaxi.is_sum(eqn) and (i := _added_to(eqn, given)) is not None:
        operands[i], results[0] = True, versions[i]
    elif jaxi.takes_part(eqn) and (whole := given[0]):
        operands[0], results[0] = True, whole._replace(is_version=False)
    elif eqn.primitive in takes:
        operands, results = _taken_by_ours(eqn, given, versions)
    elif inner := inner_of(eqn):
        own, roots = inner.settled({i for i, at in inner.operands.items() if versions[at]})
        taken = {inner.operands[i] for i in own}
        operands = [at in taken for at in range(len(given))]
        for output, root in roots.items():
            results[inner.results[output]] = versions[inner.operands[root]]
    return Taken(tuple(operands), tuple(results))


# Of primitives of loopax: the operands of which they ask only whether lanes have their own, and by results the operands
# of which they write rows in lanes that are active.
takes: dict[Primitive, Callable[[Any], tuple[Sequence[int], dict[int, int]]]] = {}


def _taken_by_ours(
    eqn: Any, given: Sequence[Own | None], versions: Sequence[Own | None]
) -> tuple[list[bool], list[Own | None]]:
    unread, written = takes[eqn.primitive](eqn)
    if any(versions[at] is None for at in written.values()):
        written = {}
    operands = [value is not None and (at in unread or at in written.values()) for at, value in enumerate(given)]
    return operands, [versions[written[k]] if k in written else None for k in range(len(eqn.outvars))]


def _added_to(eqn: Any, given: Sequence[Own | None]) -> int | None:
    """Which operand of a sum is a version to which something is added that is no lane's own."""
    aval, found = eqn.outvars[0].aval, [(i, value) for i, value in enumerate(given) if value]
    versions = [i for i, value in found if value.is_version and eqn.invars[i].aval.shape == aval.shape]
    return versions[0] if len(found) == len(versions) == 1 else None


class Inner(NamedTuple):
    """The programs in an equation: branches, a call, or the bodies of a loop."""

    programs: Sequence[ClosedJaxpr]
    operands: dict[int, int]  # of the equation, by inputs of the programs that may be a lane's own
    results: dict[int, int]  # of the equation, by outputs of the programs that may be a lane's own
    carried: dict[int, int] | None = None  # of a loop, the output that each leaf of the carry (an input) has become

    def settled(self, own: Set[int]) -> tuple[Set[int], dict[int, int]]:
        """Which of these inputs stay a lane's own, and by outputs that are versions the inputs of which they are."""
        while True:
            found = [
                own_values(program, tuple(i in own for i in range(len(program.in_avals)))) for program in self.programs
            ]
            roots = {k: root for k in self.results for root in self._roots_of(k, found)}
            outputs = ((k, value) for values in found for k, value in enumerate(values.outputs))
            lost = {value.root for k, value in outputs if value and value.is_version and roots.get(k) != value.root}
            lost |= {i for i, k in (self.carried or {}).items() if roots.get(k) != i}
            lost = lost.union(*(values.strays for values in found))
            if own.isdisjoint(lost):
                return own, roots
            own = own - lost

    def _roots_of(self, output: int, found: Sequence[OwnValues]) -> set[int]:
        """The input of which an output is a version in all programs, if there is one; that of the leaf in a loop."""
        values = {values.outputs[output] for values in found}
        roots = {value.root for value in values if value and value.is_version} if len(values) == 1 else set()
        return roots if self.carried is None else {root for root in roots if self.carried.get(root) == output}


def versions_of_inputs(program: ClosedJaxpr) -> list[int | None]:
    """For each output the large input of which it is a version; None: it is none."""
    found = own_values(program, tuple(map(is_large, program.in_avals))).outputs
    return [value.root if value and value.is_version else None for value in found]


@weakly_cached
def read_in_part(program: ClosedJaxpr) -> Mask:
    """Which large inputs are touched by nothing but reads of parts."""
    large = tuple(map(is_large, program.in_avals))
    found = own_values(program, large)
    strays = found.strays | {value.root for value in found.outputs if value and value.is_version}
    return tuple(flag and i not in strays for i, flag in enumerate(large))


def kept_by_lanes(body: ClosedJaxpr, lanes: Any, mapped: LoopInputs) -> tuple[Mask, list[int]]:
    """Which inputs of the body of a batch finished lanes keep as their own, and which outputs are then left to them.

    The body is (row, *consts, *carry, *x) -> (*carry, *y); `mapped` says which inputs the `lanes` have of their own.
    """
    first = 1 + len(mapped.consts)
    carry = range(first, first + len(mapped.carry))
    sizes = [prod((lanes, *aval.shape)) for aval in body.in_avals]  # with a symbolic dimension: large
    pays = [not isinstance(size, int) or size >= _MIN_ELEMENTS for size in sizes]
    pays = [is_worth and not jaxi.is_on_host(aval) for is_worth, aval in zip(pays, body.in_avals, strict=True)]
    # A lane that has finished writes nothing. Where other lanes see what it has written, it does so, and all is undone.
    pays = [is_worth and not is_mixed for is_worth, is_mixed in zip(pays, mixed_inputs(body), strict=True)]
    have_lanes = (False, *mapped.consts, *mapped.carry, *(False for _ in mapped.xs))
    are_buffers = (False, *read_only(body, range(1, first)), *buffers(body, carry), *(False for _ in mapped.xs))
    inner = Inner([body], _alike(range(carry.stop)), _alike(range(len(carry))), {i: k for k, i in enumerate(carry)})
    chosen = zip(have_lanes, either(pays, are_buffers), strict=True)
    own, _ = inner.settled({i for i, (has_lanes, is_worth) in enumerate(chosen) if has_lanes and is_worth})
    return tuple(i in own for i in range(len(have_lanes))), [k for k, i in enumerate(carry) if i in own]


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


def _alike(numbers: range) -> dict[int, int]:
    return {i: i for i in numbers}


def inner_of(eqn: Any) -> Inner | None:
    """The programs in an equation of control flow, or of a call; None if it is neither, or nobody knows."""
    results = _alike(range(len(eqn.outvars)))
    if jaxi.is_cond(eqn):
        return Inner(
            list(map(branch_in_place, jaxi.branches(eqn))), {at - 1: at for at in range(1, len(eqn.invars))}, results
        )
    if program := jaxi.inlinable(eqn):
        return Inner([branch_in_place(program)], _alike(range(len(eqn.invars))), results)
    if loop := jaxi.lax_loop(eqn):
        operands = {i: i + loop.num_cond_consts for i in range(loop.carry_range.stop)}
        if loop.cond is not None:  # whether it goes on, a lane asks of what is an active lane's
            asked = {atom for eqn in loop.cond.eqns for atom in eqn.invars if not isinstance(atom, Literal)}
            leaves = zip(loop.carry_range, loop.cond.invars[loop.num_cond_consts :], strict=True)
            for i in (i for i, leaf in leaves if leaf in asked or leaf in loop.cond.outvars):
                del operands[i]
        carried = {i: k for k, i in enumerate(loop.carry_range)}
        return Inner([loop.body], operands, _alike(range(loop.num_carry)), carried)
    if eqn.primitive not in walks:
        return None
    walk, body = walks[eqn.primitive], body_of(eqn)
    loop, leaves = walk.steps(**eqn.params), list(carried_by[eqn.primitive](eqn))
    operands = {leaf.input: leaf.operand for leaf in leaves}
    if walk.inverse_is_alike or loop.inverse is None:
        operands |= {1 + i: walk.num_limits + i for i in range(loop.num_consts)}
    programs = [body] if loop.inverse is None or not walk.inverse_is_alike else [body, loop.inverse]
    results = {leaf.output: leaf.result for leaf in leaves}
    return Inner(programs, operands, results, {leaf.input: leaf.output for leaf in leaves})
