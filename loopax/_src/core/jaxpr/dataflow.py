"""Which outputs of a jaxpr depend on which of its inputs.

Sets of inputs are bit masks in Python integers, propagated forward once: asking JAX's dead-code
elimination once per output instead is quadratic in the number of leaves.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

from loopax._src.core.jaxpr.silent import silent_equation
from loopax._src.core.jaxpr.util import Mask, either, split_list, weakly_cached
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    Scan,
    While,
    branches,
    dce,
    happens,
    inlinable,
    is_cond,
    is_scan,
    is_while,
    used_inputs,
)

# For each primitive of loopax: equation -> for each output, the set of the inputs it depends on.
dependence_rules: dict[Any, Callable[[Any], list[int]]] = {}


@weakly_cached
def dependence(closed: ClosedJaxpr) -> tuple[int, ...]:
    """For each output, the set of inputs on which it depends; bit i stands for input i."""
    known = {variable: 1 << i for i, variable in enumerate(closed.jaxpr.invars)}

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else known.get(atom, 0)

    for eqn in closed.jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if any(inputs):
            for variable, needed in zip(eqn.outvars, of_equation(eqn), strict=True):
                known[variable] = union(inputs, needed)
    return tuple(read(atom) for atom in closed.jaxpr.outvars)


def of_equation(eqn: Any) -> list[int]:
    """For each output of an equation, the set of its inputs on which the output depends."""
    everything = [(1 << len(eqn.invars)) - 1] * len(eqn.outvars)
    if len(eqn.outvars) == 1:
        return everything
    if eqn.primitive in dependence_rules:
        return dependence_rules[eqn.primitive](eqn)
    if program := inlinable(eqn):
        return list(dependence(program))
    if is_while(eqn):
        return _while(While.of(eqn))
    if is_scan(eqn):
        return _scan(Scan.of(eqn), [1 << i for i in range(len(eqn.invars))])
    if is_cond(eqn):
        return [1 | reduce(or_, needed) << 1 for needed in zip(*map(dependence, branches(eqn)), strict=True)]
    if happens(eqn.effects):  # no output depends on what they get
        eqn = silent_equation(eqn)
    outputs = range(len(eqn.outvars))
    used = [used_inputs(eqn, [k == chosen for k in outputs]) for chosen in outputs]
    return [to_bits(mask) for mask in used if mask is not None] or everything


def _while(loop: While) -> list[int]:
    """A `while_loop` of `jax.lax`, for which JAX has no rule."""
    inputs = [1 << i for i in range(loop.carry_start + loop.num_carry)]
    (cond_consts, operands) = split_list(inputs, [loop.num_cond_consts])
    carry = close_over_carry(dependence(loop.body), range(loop.num_consts, len(operands)), operands)
    goes_on = union([*cond_consts, *carry], dependence(loop.cond)[0])
    return [bits | goes_on for bits in carry]


def _scan(loop: Scan, inputs: list[int]) -> list[int]:
    """A `scan` of `jax.lax`. JAX's rule would ask the primitives in it, once for each result."""
    body, carry = dependence(loop.body), range(loop.num_consts, loop.num_consts + loop.num_carry)
    inputs[carry.start : carry.stop] = close_over_carry(body[: loop.num_carry], carry, inputs)
    return [*inputs[carry.start : carry.stop], *(union(inputs, needed) for needed in body[loop.num_carry :])]


def to_bits(mask: Sequence[bool]) -> int:
    """A list of bools as a set."""
    return sum(1 << i for i, chosen in enumerate(mask) if chosen)


def members(bits: int) -> list[int]:
    """The elements of a set, in order."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def union(sets: Sequence[int], chosen: int) -> int:
    """The union of the chosen sets."""
    return reduce(or_, (sets[i] for i in members(chosen)), 0)


def close_over_carry(body: Sequence[int], carry: range, inputs: Sequence[int]) -> list[int]:
    """What the carry of a loop depends on after any number of steps.

    `body` is the dependence of the carry's outputs in the loop's body, `carry` the positions of the
    carry among the body's inputs, `inputs` what each input of the body depends on before the loop.
    """
    inputs = list(inputs)
    while True:
        grown = [inputs[i] | union(inputs, needed) for i, needed in zip(carry, body, strict=True)]
        if grown == [inputs[i] for i in carry]:
            return grown
        inputs[carry.start : carry.stop] = grown


def dependence_fixpoint(
    closed: ClosedJaxpr,
    inputs: Sequence[bool],
    carry: range,
    allowed: Sequence[bool] | None = None,
    inverse: ClosedJaxpr | None = None,
) -> Mask:
    """Which outputs of a loop's body get a property that flows from inputs to outputs.

    The carry is the body's first outputs, and its inputs at the positions `carry`: the least fixed
    point, in which a leaf that once had the property keeps it. `allowed` limits it to some outputs. It also flows
    through the `inverse`, a body with the same inputs that returns a carry.
    """
    needed, back = dependence(closed), () if inverse is None else dependence(inverse)
    marked = to_bits(inputs)
    while True:
        outputs = [bool(bits & marked) for bits in needed]
        if allowed is not None:
            outputs = [a and b for a, b in zip(outputs, allowed, strict=True)]
        grown = marked | to_bits(outputs[: len(carry)]) << carry.start
        for i, (bits, place) in enumerate(zip(back, carry, strict=False)):
            if bits & marked and (allowed is None or allowed[i]):
                grown |= 1 << place
        if grown == marked:
            kept = [bool(marked >> i & 1) for i in carry]
            return (*kept, *outputs[len(carry) :])
        marked = grown


def needed_inputs(
    closed: ClosedJaxpr, carry: range, outputs: Sequence[bool], inverse: ClosedJaxpr | None = None
) -> Mask:
    """Which inputs of a loop's body these outputs need after any number of steps.

    The carry is the body's first outputs, and its inputs at the positions `carry`: the least fixed point, in which a
    leaf that is needed once stays so. What the `inverse`, a body with the same inputs that returns a carry, needs to
    walk these leaves back is needed, too.
    """
    needed, others = tuple(outputs[: len(carry)]), outputs[len(carry) :]
    while True:
        used = dce(closed, [*needed, *others], False)[1]
        if inverse is not None:
            used = either(used, dce(inverse, needed, False)[1])
        grown = either(needed, used[carry.start : carry.stop])
        if grown == needed:
            return (*used[: carry.start], *needed, *used[carry.stop :])
        needed = grown
