"""The versions of a buffer in the body of a loop, of which only the last one matters.

A *buffer* is a leaf of the carry that is touched by nothing but the operations of `core/row_buffers.py`, and by loops
in the body that do the same. Every operation makes a new version of it, and each is used once, in a chain from the
leaf that comes in to the one that goes out. So

- a batch need not choose between the old and the new array where a lane has finished: that lane does not write;
- what is *appended* is not changed again, so every version holds the same rows as the last one, as far as it has been
  written. Reverse mode stores no version: it reads the last (`frozen`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from loopax._src.core.ir.kind import LoopOperands
from loopax._src.core.ir.loop import Loop, Outcome, loop_p, num_recorded, run
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.util import (
    Mask,
    bind_again,
    evaluate,
    flatten,
    inner_jaxprs,
    merge_lists,
    reject,
    select,
    split_list,
    stacked,
    trace,
    weakly_cached,
)
from loopax._src.core.row_buffers import VERSION, add_p, appends, get, get_p, put, put_p, take_p, view_p
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    dce,
    inlinable,
    jaxpr_as_fun,
    zeros,
)

# The tape of a loop whose inverse reads a row that its step has recorded.
#
# The inverse of such a loop has more inputs than the body: behind the others, a row of the tape. The body returns the
# row as its last ys. The tape is a buffer in the carry: a step appends its row, and the inverse reads it.


def run_with_tape(loop: Loop, operands: LoopOperands) -> Outcome:
    """Run a loop that may have a tape. Rows of the tape are not among the results.

    The tape is as long as the loop's bound. Without a bound there is none, and the loop has no inverse.
    """
    num_rows = num_recorded(loop.body, loop.inverse)
    if not num_rows:
        return run(loop, *operands)
    if loop.bound is None:
        num_outputs = len(loop.body.out_avals)
        body = dce(loop.body, [i < num_outputs - num_rows for i in range(num_outputs)], True)[0]
        return run(loop._replace(body=body, inverse=None), *operands)
    tape = [zeros(stacked(aval, loop.bound)) for aval in loop.body.out_avals[-num_rows:]]
    out = run(_taped(loop), *operands._replace(carry=[*operands.carry, *tape]))
    return out._replace(carry=out.carry[: loop.num_carry])


@weakly_cached
def _taped(loop: Loop) -> Loop:
    """The loop with its tape as last leaves of the carry."""
    assert loop.inverse is not None
    body, inverse = jaxpr_as_fun(loop.body), jaxpr_as_fun(loop.inverse)
    num_rows = num_recorded(loop.body, loop.inverse)
    (row, *_), (consts, carry, xs) = loop.body.in_avals, loop.input_avals
    tape = [stacked(aval, loop.bound or 0) for aval in loop.body.out_avals[-num_rows:]]
    sizes = [loop.num_consts, loop.num_carry, num_rows]

    def forward(row: Any, *operands: Any) -> list[Any]:
        consts, carry, tape, x = split_list(operands, sizes)
        out = body(row, *consts, *carry, *x)
        carry, ys, recorded = split_list(out, [loop.num_carry, len(out) - loop.num_carry - num_rows])
        tape = [put(rows, row, new, appends=True) for rows, new in zip(tape, recorded, strict=True)]
        return [*carry, *tape, *ys]

    def back(row: Any, *operands: Any) -> list[Any]:
        consts, carry, tape, x = split_list(operands, sizes)
        recorded, tape = zip(*(get(rows, row) for rows in tape), strict=True)
        return [*inverse(row, *consts, *carry, *x, *recorded), *tape]

    types = [row, *consts, *carry, *tape, *xs]
    num_carry = loop.num_carry + num_rows
    return loop._replace(body=trace(forward, types), inverse=trace(back, types), num_carry=num_carry)


# ---- which leaves are buffers


@weakly_cached
def buffers(closed: ClosedJaxpr, carry: range, only_appended: bool = False) -> Mask:
    """Which leaves of the carry are buffers.

    The carry is the body's first outputs, and its inputs at these positions; `only_appended` leaves out those of which
    rows are overwritten.
    """
    flows, inputs, outputs = _flows(closed, carry, only_appended), closed.invars, closed.outvars
    ends = zip(carry, flows, outputs, strict=False)
    return tuple(not flow.strays and flow.last is out and flow.last is not inputs[i] for i, flow, out in ends)


def keep_rows(closed: ClosedJaxpr, carry: range) -> Mask:
    """Which leaves of the carry keep the rows that they have, or are not touched at all.

    As in `buffers`, the carry is the body's first outputs.
    """
    flows, outputs = _flows(closed, carry, True), closed.outvars
    return tuple(not flow.strays and flow.last is out for flow, out in zip(flows, outputs, strict=False))


def strays(closed: ClosedJaxpr, inputs: range) -> list[list[str]]:
    """For each of these inputs, the primitives to which its versions go that are no operations of buffers."""
    return [flow.strays for flow in _flows(closed, inputs, False)]


class _Flow(NamedTuple):
    """Where an input goes."""

    last: Any  # the variable of its last version
    strays: list[str]  # the primitives that do something else with it


@weakly_cached
def _flows(closed: ClosedJaxpr, inputs: range, only_appended: bool) -> list[_Flow]:
    roots: dict[Any, int] = {closed.invars[i]: place for place, i in enumerate(inputs)}
    flows = [_Flow(closed.invars[i], []) for i in inputs]
    for eqn in closed.eqns:
        for position, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal) or atom not in roots:
                continue
            place, result = roots[atom], _next_version(eqn, position, only_appended)
            if result is None or atom is not flows[place].last:
                flows[place].strays.extend(_names(eqn, position))
            else:
                flows[place] = flows[place]._replace(last=eqn.outvars[result])
                roots[eqn.outvars[result]] = place
    for place, atom in enumerate(closed.outvars):
        if not isinstance(atom, Literal) and atom in roots and roots[atom] != place:
            flows[roots[atom]].strays.append("return")
    return flows


def _names(eqn: Any, position: int) -> list[str]:
    """The primitives that an operand goes to, those inside of a call by their own names."""
    program = inlinable(eqn)
    if program is None:
        return [eqn.primitive.name]
    return _flows(program, range(position, position + 1), False)[0].strays


def _next_version(eqn: Any, position: int, only_appended: bool) -> int | None:
    """Which result is the next version of an operand; None if none is."""
    primitive = eqn.primitive
    if primitive in VERSION:
        overwrites = primitive in (add_p, take_p) or (primitive is put_p and not appends(eqn))
        return VERSION[primitive] if position == 0 and not (only_appended and overwrites) else None
    if primitive is loop_p:
        loop = Loop(**eqn.params)
        leaf, first = position - 2 - loop.num_consts, 1
        mask = buffers(loop.body, loop.carry_range, only_appended)
        mask = [b and not saved for b, saved in zip(mask, loop.saved_mask, strict=True)]
    elif primitive is reverse_sweep_p:
        sweep = ReverseSweep(**eqn.params)
        leaf, first = position - 3 - sweep.num_consts - 2 * sweep.num_state, 0
        start = 1 + sweep.num_consts
        mask = buffers(sweep.backward, range(start, start + sweep.num_carry), only_appended)
    else:
        return None
    return first + leaf if 0 <= leaf < len(mask) and mask[leaf] else None


@weakly_cached
def read_only(closed: ClosedJaxpr, inputs: range) -> Mask:
    """Which inputs are touched by nothing but reads of their rows."""
    variables = [closed.invars[i] for i in inputs]
    reads = {eqn.invars[0] for eqn in closed.eqns if eqn.primitive in (get_p, view_p)}
    versions = {eqn.outvars[1]: eqn.invars[0] for eqn in closed.eqns if eqn.primitive in (get_p, view_p)}

    def first_version(atom: Any) -> Any:
        while atom in versions:
            atom = versions[atom]
        return atom

    touched = {
        first_version(atom)
        for eqn in closed.eqns
        for position, atom in enumerate(eqn.invars)
        if not isinstance(atom, Literal) and not (position == 0 and eqn.primitive in (get_p, view_p))
    }
    touched |= {first_version(atom) for atom in closed.outvars if not isinstance(atom, Literal)}
    return tuple(variable in reads and variable not in touched for variable in variables)


@weakly_cached
def uses_buffers(closed: ClosedJaxpr) -> bool:
    """Whether there is an operation of a buffer anywhere in it."""
    return any(map(touches_buffers, closed.eqns))


def touches_buffers(eqn: Any) -> bool:
    """Whether an equation, or one inside of it, is an operation of a buffer."""
    return eqn.primitive in VERSION or any(any(map(touches_buffers, inner.eqns)) for inner in inner_jaxprs(eqn))


# ---- one version after another


class _Version(NamedTuple):
    array: Any
    root: int
    writes: int = 0  # before this version
    overwrites: int = 0  # those of them that may have changed a row that was there


class _Chains:
    """The versions of arrays while a body is evaluated."""

    def __init__(self) -> None:
        self.versions: dict[int, _Version] = {}  # by the identity of their arrays, which live as long
        self.last: dict[int, _Version] = {}  # by root

    def find(self, array: Any) -> _Version:
        """Of an array that is in no chain, a new one begins."""
        return self.versions.get(id(array)) or self._note(_Version(array, id(array)))

    def latest(self, array: Any) -> Any:
        """The last version of an array."""
        return self.last[self.find(array).root].array

    def for_reading(self, array: Any) -> Any:
        """The last version, if all rows of this one are still in it."""
        version, last = self.find(array), self.last[self.find(array).root]
        return last.array if version.overwrites == last.overwrites else array

    def for_writing(self, array: Any) -> Any:
        """The last version, if it differs in nothing."""
        version, last = self.find(array), self.last[self.find(array).root]
        return last.array if version.writes == last.writes else array

    def step(self, old: Any, new: Any, writes: bool, overwrites: bool) -> None:
        """`new` follows `old`, unless something else does already."""
        version = self.find(old)
        if self.latest(old) is old:
            self._note(_Version(new, version.root, version.writes + writes, version.overwrites + overwrites))

    def _note(self, version: _Version) -> _Version:
        self.versions[id(version.array)] = self.last[version.root] = version
        return version


def chained(closed: ClosedJaxpr) -> Callable[..., tuple[list[Any], list[Any]]]:
    """The jaxpr as a function in which each version of an array is used once, where that can be.

    It also returns the last versions of the inputs. What reads an older version reads the last one: rows are
    only appended, and what is read is there. Inner calls with buffers are written out.
    """

    def function(*inputs: Any) -> tuple[list[Any], list[Any]]:
        chains = _Chains()
        outputs = evaluate(closed, inputs, partial(_chained_equation, chains), inlined=_call_with_buffers)
        return [chains.for_writing(x) for x in outputs], [chains.latest(x) for x in inputs]

    return function


def _call_with_buffers(eqn: Any) -> ClosedJaxpr | None:
    return inlinable(eqn) if touches_buffers(eqn) else None


def _chained_equation(chains: _Chains, eqn: Any, operands: list[Any]) -> Sequence[Any]:
    followed = [(p, r) for p in range(len(operands)) if (r := _next_version(eqn, p, False)) is not None]
    writes, operands = eqn.primitive not in (get_p, view_p), list(operands)
    for position, _ in followed:
        operands[position] = (chains.for_writing if writes else chains.for_reading)(operands[position])
    results = bind_again(eqn, operands)
    for position, result in followed:
        overwrites = writes and _next_version(eqn, position, True) is None
        chains.step(operands[position], results[result], writes, overwrites)
    return results


# ---- the last version in the place of all


def frozen(closed: ClosedJaxpr, inputs: Sequence[int]) -> Callable[..., list[Any]]:
    """The jaxpr as a function that is given the last version of what is appended to, and writes nothing."""

    def function(*values: Any) -> list[Any]:
        last = {id(values[i]) for i in inputs}
        return evaluate(closed, values, lambda eqn, operands: _frozen_equation(last, eqn, operands))

    return function


def _frozen_equation(last: set[int], eqn: Any, operands: list[Any]) -> Sequence[Any]:
    mask = [id(x) in last for x in operands]
    if not any(mask):
        return bind_again(eqn, operands)
    if eqn.primitive is put_p:
        return [operands[0]]
    if eqn.primitive in (get_p, view_p):
        row, _ = bind_again(eqn, operands)
        return [row, operands[0]]
    if eqn.primitive is loop_p:
        return _run_frozen(Loop(**eqn.params), mask, operands)
    return bind_again(eqn, operands)


def _run_frozen(loop: Loop, mask: Sequence[bool], operands: list[Any]) -> list[Any]:
    low, high, *leaves = operands
    inputs, is_last = loop.inputs(leaves), tuple(loop.inputs(mask[2:]).carry)
    slim, last = _frozen_loop(loop, is_last), select(is_last, inputs.carry)
    given = inputs._replace(consts=[*inputs.consts, *last], carry=reject(is_last, inputs.carry))
    out = slim.results(loop_p.bind(low, high, *flatten(given), **slim._asdict()))
    return out._replace(carry=merge_lists(is_last, out.carry, last)).leaves


@weakly_cached
def _frozen_loop(loop: Loop, is_last: Mask) -> Loop:
    return loop._replace(
        body=frozen_body(loop.body, [loop.num_consts, loop.num_carry], is_last),
        num_consts=loop.num_consts + sum(is_last),
        num_carry=loop.num_carry - sum(is_last),
        saved=tuple(reject(is_last, loop.saved)) if loop.saved else (),
    )


def frozen_body(body: ClosedJaxpr, sizes: Sequence[int], is_last: Mask) -> ClosedJaxpr:
    """(row, *consts, *last versions, *rest of the carry, *x) -> (*rest of the carry, *y)."""
    function = frozen(body, [1 + sizes[0] + i for i, flag in enumerate(is_last) if flag])
    (row,), consts, carry, xs = split_list(body.in_avals, [1, *sizes])
    last, rest = select(is_last, carry), reject(is_last, carry)

    def step(row: Any, *operands: Any) -> list[Any]:
        consts, last, rest, xs = split_list(operands, [sizes[0], sum(is_last), is_last.count(False)])
        new_carry, ys = split_list(function(row, *consts, *merge_lists(is_last, rest, last), *xs), [len(is_last)])
        return [*reject(is_last, new_carry), *ys]

    return trace(step, [row, *consts, *last, *rest, *xs])
