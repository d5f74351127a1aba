"""Which outputs of a jaxpr depend on which of its inputs.

Sets of inputs are bit masks in Python integers, propagated forward once: asking JAX's dead-code
elimination once per output instead is quadratic in the number of leaves.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import jax.numpy as jnp

from loopax._src.core.jaxpr.evaluate import silent_equation
from loopax._src.core.jaxpr.util import Mask, either, inner_jaxprs, select, split_list, weakly_cached
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    Primitive,
    Scan,
    While,
    axis_after,
    branches,
    called,
    can_transpose,
    custom_vmap_rule,
    dce,
    draws_for_all_lanes,
    happens,
    inlinable,
    is_cond,
    is_elementwise_operation,
    is_reduction_or_move,
    is_scan,
    is_while,
    used_inputs,
)

# For each primitive of loopax: equation -> for each output, the set of the inputs it depends on.
dependence_rules: dict[Any, Callable[[Any], list[int]]] = {}


@weakly_cached
def dependence(closed: ClosedJaxpr) -> tuple[int, ...]:
    """For each output, the set of inputs on which it depends; bit i stands for input i."""
    known = {variable: 1 << i for i, variable in enumerate(closed.invars)}

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else known.get(atom, 0)

    for eqn in closed.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if any(inputs):
            for variable, needed in zip(eqn.outvars, of_equation(eqn), strict=True):
                known[variable] = union(inputs, needed)
    return tuple(read(atom) for atom in closed.outvars)


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
    inputs = [1 << i for i in range(loop.num_cond_consts + loop.carry_range.stop)]
    (cond_consts, operands) = split_list(inputs, [loop.num_cond_consts])
    carry = close_over_carry(dependence(loop.body), loop.carry_range, operands)
    goes_on = union([*cond_consts, *carry], dependence(loop.cond)[0])
    return [bits | goes_on for bits in carry]


def _scan(loop: Scan, inputs: list[int]) -> list[int]:
    """A `scan` of `jax.lax`. JAX's rule would ask the primitives in it, once for each result."""
    body, carry = dependence(loop.body), loop.carry_range
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


# Whether a program that somebody has written for a batch keeps its lanes apart.
#
# The rule of a `custom_vmap` may do anything with its lanes: sort them, or subtract their mean. Here the axis of
# lanes is followed from equation to equation. What works along it mixes lanes, and so may what is not known here.

Axes = Sequence[int | None]  # of each value: which of its axes is that of lanes; None: all lanes have the same value


class MayMixLanesError(Exception):
    """It cannot be said that a program keeps lanes apart."""


def keeps_lanes_apart(program: ClosedJaxpr, inputs: Axes, results: Axes) -> bool:
    """Whether each lane of the results follows from the same lane of the inputs."""
    try:
        return list(_follow(program, inputs)) == list(results)
    except MayMixLanesError:
        return False


def _follow(program: ClosedJaxpr, inputs: Axes) -> list[int | None]:
    """The axis of lanes of each result."""
    axes: dict[Any, int | None] = dict(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else axes.get(atom)

    for eqn in program.eqns:
        given = [read(atom) for atom in eqn.invars]
        found = _of_equation(eqn, given) if any(axis is not None for axis in given) else [None] * len(eqn.outvars)
        axes.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in program.outvars]


def _of_equation(eqn: Any, given: Axes) -> Axes:
    if draws_for_all_lanes(eqn):
        raise MayMixLanesError
    if (program := called(eqn)) is not None:
        return _follow(program, given)
    if is_cond(eqn):
        return _same([_follow(branch, given[1:]) for branch in branches(eqn)])
    if is_scan(eqn):
        return _follow_scan(Scan.of(eqn), given)
    if is_while(eqn):
        loop = While.of(eqn)
        _, consts, carry = split_list(given, loop.sizes)
        return _carried(loop.body, consts, carry, [])[0]
    if not eqn.outvars:  # an effect, of which no lane sees anything
        return []
    axis = None if eqn.effects else axis_after(eqn, given)
    if axis is None:
        raise MayMixLanesError
    return [axis] * len(eqn.outvars)


def _same(found: Sequence[Axes]) -> Axes:
    if any(axes != found[0] for axes in found):
        raise MayMixLanesError
    return found[0]


def _follow_scan(loop: Scan, given: Axes) -> Axes:
    consts, carry, xs = split_list(given, loop.sizes)
    if not carry and all(axis is None for axis in consts) and all(axis in (0, None) for axis in xs):
        return [0] * (len(loop.body.out_avals) - len(carry))  # a map over lanes, one after another
    if any(axis == 0 for axis in xs):
        raise MayMixLanesError
    carry, ys = _carried(loop.body, consts, carry, [None if axis is None else axis - 1 for axis in xs])
    return [*carry, *(None if axis is None else axis + 1 for axis in ys)]


def _carried(body: ClosedJaxpr, consts: Axes, carry: Axes, x: Axes) -> tuple[Axes, Axes]:
    """The axes of carry and rows at the fixed point: a leaf that all lanes share may come to differ."""
    while True:
        out, ys = split_list(_follow(body, [*consts, *carry, *x]), [len(carry)])
        grown = [new if old is None else old for old, new in zip(carry, out, strict=True)]
        if grown == list(carry):
            return _same([carry, out]), ys
        carry = grown


# What a lane of a batch computes from the operands of other lanes: random bits of some PRNGs, rules of `custom_vmap`.
#
# JAX draws for a whole batch with the key of its first lane, where keys are of `rbg` or `unsafe_rbg`. So what a lane
# draws depends on its batch. It may not depend on more: a finished lane keeps the operands from which it would draw,
# with and without a derivative, and the batch stays as it is.


# For each primitive of loopax: equation -> which of its operands are mixed inside.
mixed_operands: dict[Primitive, Callable[[Any], Sequence[bool]]] = {}


def mixing_primitive(closed: ClosedJaxpr) -> str | None:
    """The name of a primitive in a program, or in programs inside, that mixes lanes; None if none does."""
    return _mixing_primitive(closed)


@weakly_cached
def _mixing_primitive(jaxpr: Any) -> str | None:
    for eqn in jaxpr.eqns:
        if mixes_lanes(eqn):
            return eqn.primitive.name
        if name := next(filter(None, map(_mixing_primitive, inner_jaxprs(eqn))), None):
            return name
    return None


def mixes_lanes(eqn: Any) -> bool:
    """Whether a batch of an equation is more than the equation for each lane."""
    trace_rule = custom_vmap_rule(eqn)
    if trace_rule is None:
        return draws_for_all_lanes(eqn)
    try:
        return not keeps_lanes_apart(*trace_rule())
    except Exception:  # noqa: BLE001 - a user's rule may refuse this batch in any way: then nothing is known of it
        return True


@weakly_cached
def mixed_inputs(closed: ClosedJaxpr) -> Mask:
    """Which inputs of a program flow into what mixes lanes."""
    if mixing_primitive(closed) is None:
        return (False,) * len(closed.invars)
    wanted = set[Any]()
    for eqn in reversed(closed.eqns):
        mixed = to_bits(_mixed_operands(eqn))
        needed = zip(eqn.outvars, of_equation(eqn), strict=True) if wanted.intersection(eqn.outvars) else ()
        for variable, bits in needed:
            mixed |= bits if variable in wanted else 0
        wanted.update(eqn.invars[i] for i in members(mixed) if not isinstance(eqn.invars[i], Literal))
    return tuple(variable in wanted for variable in closed.invars)


def _mixed_operands(eqn: Any) -> Sequence[bool]:
    """Which operands of an equation are mixed, or flow into what mixes lanes inside of it."""
    everything = [True] * len(eqn.invars)
    if mixes_lanes(eqn):
        return everything
    if eqn.primitive in mixed_operands:
        return mixed_operands[eqn.primitive](eqn)
    if not any(map(_mixing_primitive, inner_jaxprs(eqn))):
        return [False] * len(eqn.invars)
    if is_scan(eqn):
        return mixed_inputs_of_steps(Scan.of(eqn).body, Scan.of(eqn).carry_range)
    if is_while(eqn):
        return _mixed_in_while(While.of(eqn))
    if is_cond(eqn):
        return [False, *map(any, zip(*map(mixed_inputs, branches(eqn)), strict=True))]
    program = called(eqn)
    return everything if program is None else mixed_inputs(program)


def _mixed_in_while(loop: While) -> Sequence[bool]:
    carry = loop.carry_range
    mixed, (bits,) = mixed_inputs(loop.cond), dependence(loop.cond)
    consts, leaves = split_list(mixed, [loop.num_cond_consts])
    deciding = [bool(bits >> i & 1) for i in range(len(mixed))]
    body = mixed_inputs_of_steps(loop.body, carry, leaves, deciding[loop.num_cond_consts :])
    if any(body[i] for i in carry):
        consts = either(consts, deciding[: loop.num_cond_consts])
    return [*consts, *body]


def mixed_inputs_of_steps(
    body: ClosedJaxpr, carry: range, also: Sequence[bool] = (), deciding: Sequence[bool] = ()
) -> Mask:
    """Which inputs of a loop's body flow into what mixes lanes, in any number of steps.

    The carry is the body's first outputs, and its inputs at the positions `carry`; `also` says which leaves of it are
    mixed outside of the body, `deciding` which decide on the number of steps. These are mixed where any leaf is: what
    other lanes see of a lane depends on how many steps it has taken.
    """
    mixed, needed = mixed_inputs(body), dependence(body)

    def of_carry(leaves: Sequence[bool]) -> list[bool]:
        return [i in carry and leaves[i - carry.start] for i in range(len(mixed))]

    if also:
        mixed = either(mixed, of_carry(also))
    while True:
        if deciding and any(mixed[i] for i in carry):
            mixed = either(mixed, of_carry(deciding))
        from_before = [needed[i - carry.start] for i in carry if mixed[i]]
        grown = tuple(is_mixed or any(bits >> i & 1 for bits in from_before) for i, is_mixed in enumerate(mixed))
        if grown == mixed:
            return mixed
        mixed = grown


# What loopax's own primitives say of themselves to who asks about a program: registered by each.


# What an equation computes, where that is not all of its results.
computed: dict[Primitive, Callable[[Any], Sequence[Any]]] = {}
# Of loops: the limit on their steps, and whether it is loose: perhaps far above the steps that are taken.
step_limits: dict[Primitive, Callable[[Any], tuple[int | None, bool]]] = {}
# Linear in all real operands together.
jointly_linear: set[Primitive] = set()


# What programs are said to be: whether they end, are a few elementwise operations, or can be transposed.

_FEW = 40  # equations


def always_ends(jaxpr: Any) -> bool:
    """Whether a program has no effects, and no loop in it whose number of steps has no bound."""
    return not jaxpr.effects and all(
        not (is_while(eqn) or (eqn.primitive in step_limits and step_limits[eqn.primitive](eqn)[0] is None))
        and all(map(always_ends, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def linear_results(jaxpr: Any, linear: Sequence[bool]) -> list[bool] | None:
    """Which results are linear in these inputs; None where an operation on them is not known to be.

    JAX can transpose a program of which this is known.
    """
    found = set(select(linear, jaxpr.invars))

    def is_linear(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in found

    for eqn in jaxpr.eqns:
        operands = list(map(is_linear, eqn.invars))
        if not any(operands):
            continue
        results = _linear_results(eqn, operands)
        if results is None:
            return None
        found.update(select(results, eqn.outvars))
    # A bool or an integer has no tangent.
    is_real = all(jnp.issubdtype(variable.aval.dtype, jnp.inexact) for variable in found)
    return list(map(is_linear, jaxpr.outvars)) if is_real else None


def _linear_results(eqn: Any, operands: Sequence[bool]) -> list[bool] | None:
    program = inlinable(eqn)
    if program is not None:
        return linear_results(program, operands)
    is_known = eqn.primitive in jointly_linear or (can_transpose(eqn, operands) and not any(inner_jaxprs(eqn)))
    return [True] * len(eqn.outvars) if is_known else None


def is_arithmetic(jaxpr: Any) -> bool:
    """Whether a program is operations on arrays, whose time no value makes longer; an unknown operation is none."""
    return not jaxpr.effects and all(map(_is_arithmetic, jaxpr.eqns))


def _is_arithmetic(eqn: Any) -> bool:
    if is_scan(eqn) or is_cond(eqn) or called(eqn) is not None:
        return all(map(is_arithmetic, inner_jaxprs(eqn)))
    return is_elementwise_operation(eqn) or is_reduction_or_move(eqn)


def is_elementwise(closed: ClosedJaxpr) -> bool:
    """Whether a jaxpr is a few elementwise operations, which XLA fuses with what is around them."""
    return not closed.effects and len(closed.eqns) <= _FEW and all(map(_is_elementwise, closed.eqns))


def _is_elementwise(eqn: Any) -> bool:
    program = inlinable(eqn)
    return is_elementwise_operation(eqn) if program is None else is_elementwise(program)
