"""The versions of a buffer in the body of a loop, of which only the last one matters.

A *buffer* is a leaf of the carry that is touched by nothing but the operations of `core/row_buffers.py`, and by loops
in the body that do the same. Every operation makes a new version of it, and each is used once, in a chain from the
leaf that comes in to the one that goes out. So

- a batch need not choose between the old and the new array where a lane has finished: that lane does not write;
- what is *appended* is not changed again, so every version holds the same rows as the last one, as far as it has been
  written. Reverse mode stores no version: it reads the last (`body_of_last_versions`).
"""

import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from loopax._src.core.ir.kind import LoopOperands
from loopax._src.core.ir.loop import Loop, Outcome, loop_p, num_recorded, run
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.util import (
    Mask,
    bind_again,
    evaluate,
    invert,
    reject,
    select,
    stacked,
    trace,
    weakly_cached,
)
from loopax._src.core.masking import an_active_p, one_that_walked, walk_row_p, walked
from loopax._src.core.row_buffers import VERSION, appends, get, get_p, put, put_p, view_p
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    dce,
    equations_in,
    inlinable,
    jaxpr_as_fun,
    replace_jaxpr,
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
    taped = loop._replace(num_carry=loop.num_carry + num_rows)

    # Before: (row, *consts, *carry, *x) -> (*carry, *y, *recorded)
    # After: (row, *consts, *carry, *tape, *x) -> (*carry, *tape, *y)
    def forward(row: Any, *operands: Any) -> list[Any]:
        consts, carry, x = taped.inputs(operands)
        out = body(row, *consts, *carry[: loop.num_carry], *x)
        tape, recorded = carry[loop.num_carry :], out[len(out) - num_rows :]
        tape = [put(rows, row, new, appends=True) for rows, new in zip(tape, recorded, strict=True)]
        return [*out[: loop.num_carry], *tape, *out[loop.num_carry : len(out) - num_rows]]

    # Before: (row, *consts, *carry, *x, *recorded) -> (*carry)
    # After: (row, *consts, *carry, *tape, *x) -> (*carry, *tape)
    def back(row: Any, *operands: Any) -> list[Any]:
        consts, carry, x = taped.inputs(operands)
        recorded, tape = zip(*(get(rows, row) for rows in carry[loop.num_carry :]), strict=True)
        return [*inverse(row, *consts, *carry[: loop.num_carry], *x, *recorded), *tape]

    types = [row, *consts, *carry, *tape, *xs]
    return taped._replace(body=trace(forward, types), inverse=trace(back, types))


# ---- which leaves are buffers


# The operations whose results are versions. final: those of which the last version says what the others said.
Followed = typing.Literal["all", "appends", "final", "reads"]


@weakly_cached
def buffers(closed: ClosedJaxpr, carry: range, followed: Followed = "all") -> Mask:
    """Which leaves of the carry are buffers.

    The carry is the body's first outputs, and its inputs at these positions; "appends" leaves out those of which rows
    are overwritten; "final" adds the ends of lanes.
    """
    ends = zip(_flows(closed, carry, followed), closed.outvars, strict=False)
    return tuple(not flow.strays and len(flow.versions) > 1 and flow.versions[-1] is out for flow, out in ends)


def ends(closed: ClosedJaxpr, carry: range) -> Mask:
    """Which leaves of the carry are the ends of lanes (`walk_row` in `core/masking.py`)."""
    pairs = zip(buffers(closed, carry, "final"), buffers(closed, carry, "appends"), strict=True)
    return tuple(is_final and not appended for is_final, appended in pairs)


def keep_rows(closed: ClosedJaxpr, carry: range) -> Mask:
    """Which leaves of the carry keep the rows that they have, or are not touched at all.

    As in `buffers`, the carry is the body's first outputs.
    """
    ends = zip(_flows(closed, carry, "appends"), closed.outvars, strict=False)
    return tuple(not flow.strays and flow.versions[-1] is out for flow, out in ends)


def returned(closed: ClosedJaxpr, carry: range) -> Mask:
    """Which leaves of the carry are returned as they came: nothing, or reads of their rows, stands between."""
    ends = zip(_flows(closed, carry, "reads"), closed.outvars, strict=False)
    return tuple(out in flow.versions for flow, out in ends)


def read_only(closed: ClosedJaxpr, inputs: range) -> Mask:
    """Which inputs are touched by nothing but reads of their rows."""
    flows, given_back = _flows(closed, inputs, "reads"), set(map(id, closed.outvars))
    are_kept = [not flow.strays and given_back.isdisjoint(map(id, flow.versions)) for flow in flows]
    return tuple(is_kept and len(flow.versions) > 1 for is_kept, flow in zip(are_kept, flows, strict=True))


def strays(closed: ClosedJaxpr, inputs: range) -> list[list[str]]:
    """For each of these inputs, the primitives to which its versions go that are no operations of buffers."""
    return [flow.strays for flow in _flows(closed, inputs, "all")]


class _Flow(NamedTuple):
    """Where an input goes."""

    versions: list[Any]  # their variables, the input first
    strays: list[str]  # the primitives that do something else with it


@weakly_cached
def _flows(closed: ClosedJaxpr, inputs: range, followed: Followed) -> list[_Flow]:
    flows = [_Flow([closed.invars[i]], []) for i in inputs]
    roots: dict[Any, _Flow] = {flow.versions[0]: flow for flow in flows}
    for eqn in closed.eqns:
        for position, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal) or atom not in roots:
                continue
            flow, result = roots[atom], _next_version(eqn, position, followed)
            # Each version is used once, but for one that is only read.
            if result is not None and (followed == "reads" or atom is flow.versions[-1]):
                flow.versions.append(eqn.outvars[result])
                roots[eqn.outvars[result]] = flow
                continue
            # The primitives that it goes to, those inside of a call by their own names.
            call = None if followed == "reads" else inlinable(eqn)
            flow.strays.extend(strays(call, range(position, position + 1))[0] if call else [eqn.primitive.name])
    for place, atom in enumerate(closed.outvars):
        flow = None if isinstance(atom, Literal) else roots.get(atom)
        if flow is not None and not (place < len(flows) and flow is flows[place]):
            flow.strays.append("return")
    return flows


def _next_version(eqn: Any, position: int, followed: Followed) -> int | None:
    """Which result is the next version of an operand; None if none is."""
    primitive = eqn.primitive
    if primitive in VERSION:
        reads = primitive in (get_p, view_p)
        follows = followed == "all" or reads or (primitive is put_p and followed != "reads" and appends(eqn))
        return VERSION[primitive] if position == 0 and follows else None
    if followed == "reads":
        return None
    if primitive is walk_row_p:
        return 0 if position == 0 and followed == "final" else None
    if primitive is loop_p:
        loop = Loop(**eqn.params)
        leaf, first = position - 2 - loop.num_consts, 1
        mask = buffers(loop.body, loop.carry_range, followed)
        mask = [b and not saved for b, saved in zip(mask, loop.saved_mask, strict=True)]
    elif primitive is reverse_sweep_p:
        sweep = ReverseSweep(**eqn.params)
        leaf, first = position - 3 - sweep.num_consts - 2 * sweep.num_state, 0
        start = 1 + sweep.num_consts
        mask = buffers(sweep.backward, range(start, start + sweep.num_carry), followed)
    else:
        return None
    return first + leaf if 0 <= leaf < len(mask) and mask[leaf] else None


# ---- one version after another


class _Version(NamedTuple):
    array: Any
    writes: int = 0  # before this version
    overwrites: int = 0  # those of them that may have changed a row that was there


def chained(closed: ClosedJaxpr) -> Callable[..., tuple[list[Any], list[Any]]]:
    """The jaxpr as a function in which each version of an array is used once, where that can be.

    It also returns the last versions of the inputs. What reads an older version reads the last one: rows are
    only appended, and what is read is there. Inner calls with buffers are written out.
    """

    def function(*inputs: Any) -> tuple[list[Any], list[Any]]:
        # Of an array, by its identity: the chain of its versions, which keeps them alive, and its place there.
        chains: dict[int, tuple[list[_Version], int]] = {}

        def chain_of(array: Any) -> tuple[list[_Version], int]:
            return chains.setdefault(id(array), ([_Version(array)], 0))

        def newest(array: Any, writes: bool) -> Any:
            chain, place = chain_of(array)
            # To write, the last version must differ in nothing; to read, all rows of this one must still be in it.
            count = (lambda version: version.writes) if writes else (lambda version: version.overwrites)
            return chain[-1].array if count(chain[place]) == count(chain[-1]) else array

        def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            followed = [(p, r) for p in range(len(operands)) if (r := _next_version(eqn, p, "all")) is not None]
            writes, operands = eqn.primitive not in (get_p, view_p), list(operands)
            for position, _ in followed:
                operands[position] = newest(operands[position], writes)
            results = bind_again(eqn, operands)
            for position, result in followed:
                chain, place = chain_of(operands[position])
                if place == len(chain) - 1:  # nothing else follows already
                    overwrites = writes and _next_version(eqn, position, "appends") is None
                    last = chain[-1]
                    chain.append(_Version(results[result], last.writes + writes, last.overwrites + overwrites))
                    chains[id(results[result])] = chain, place + 1
            return results

        def with_buffers(eqn: Any) -> ClosedJaxpr | None:
            inside = equations_in(program) if (program := inlinable(eqn)) else ()
            return program if any(inner.primitive in VERSION for inner in inside) else None

        outputs = evaluate(closed, inputs, equation, inlined=with_buffers)
        return [newest(x, writes=True) for x in outputs], [chain_of(x)[0][-1].array for x in inputs]

    return function


# ---- the last version in the place of all


def body_of_last_versions(body: ClosedJaxpr, sizes: Sequence[int], is_last: Mask) -> ClosedJaxpr:
    """A body that is given the last versions of what is appended to, leaves of its carry, and writes nothing.

    It is (row, *consts, *last versions, *rest of the carry, *x) -> (*rest of the carry, *y).
    """
    carry = range(1 + sizes[0], 1 + sizes[0] + len(is_last))
    places = [i for i, flag in zip(carry, is_last, strict=True) if flag]

    def reads_last(*values: Any) -> list[Any]:
        last, one_of = {id(values[i]) for i in places}, dict[int, Callable[[], Any]]()

        def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            if eqn.primitive is walk_row_p and id(operands[0]) in last:
                end, _, row, *start = operands
                active = walked(*operands, **eqn.params)
                one_of[id(active)] = lambda: one_that_walked(end, active, row, *start, **eqn.params)
                return [end, active]
            if eqn.primitive is an_active_p and (one := one_of.get(id(operands[0]))):
                return [one()]
            return _equation_of_last_versions(last, eqn, operands)

        return evaluate(body, values, equation)

    # Before: (row, *consts, *carry, *x) -> (*carry, *y)
    closed = trace(reads_last, body.in_avals)
    inputs, outputs = closed.invars, closed.outvars
    last, rest = [inputs[i] for i in places], [inputs[i] for i in carry if i not in places]
    changed = [out for out, flag in zip(outputs, is_last, strict=False) if not flag]
    # After: (row, *consts, *last versions, *rest of the carry, *x) -> (*rest of the carry, *y)
    inputs = [*inputs[: carry.start], *last, *rest, *inputs[carry.stop :]]
    closed = replace_jaxpr(closed, inputs, [*changed, *outputs[len(is_last) :]])
    return dce(closed, [True] * len(closed.out_avals), True)[0]


def _equation_of_last_versions(last: set[int], eqn: Any, operands: list[Any]) -> Sequence[Any]:
    mask = [id(x) in last for x in operands]
    if not any(mask):
        return bind_again(eqn, operands)
    if eqn.primitive is put_p:
        return [operands[0]]
    if eqn.primitive in (get_p, view_p):
        row, _ = bind_again(eqn, operands)
        return [row, operands[0]]
    if eqn.primitive is not loop_p:
        return bind_again(eqn, operands)
    loop = Loop(**eqn.params)
    inputs, is_last = loop.inputs(operands[2:]), tuple(loop.inputs(mask[2:]).carry)
    slim = loop_of_last_versions(loop, is_last)
    # Before: [low, high, *consts, *all of the carry, *xs]
    # After: [low, high, *consts, *last versions, *rest of the carry, *xs]
    carry = [*select(is_last, inputs.carry), *reject(is_last, inputs.carry)]
    out = slim.results(loop_p.bind(*operands[:2], *inputs.consts, *carry, *inputs.xs, **slim._asdict()))
    rest = iter(out.carry)
    return out._replace(carry=[x if flag else next(rest) for x, flag in zip(inputs.carry, is_last, strict=True)]).leaves


@weakly_cached
def loop_of_last_versions(loop: Loop, is_last: Mask) -> Loop:
    """The loop with these leaves of its carry, in their last versions, as its last constants.

    It has no inverse where that does more with them than to read rows.
    """
    sizes, inverse = [loop.num_consts, loop.num_carry], loop.inverse
    if inverse is not None:
        are_kept = all(select(is_last, keep_rows(inverse, loop.carry_range)))
        inverse = body_of_last_versions(inverse, sizes, is_last) if are_kept else None
    return loop._replace(
        body=body_of_last_versions(loop.body, sizes, is_last),
        inverse=inverse,
        num_consts=loop.num_consts + sum(is_last),
        **loop.kept(invert(is_last)),
    )
