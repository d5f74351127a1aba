"""Which outputs of a jaxpr depend on which of its inputs.

Sets of inputs are bit masks in Python integers, propagated forward once: asking JAX's dead-code
elimination once per output instead is quadratic in the number of leaves.
"""

from collections.abc import Callable, Sequence, Set
from functools import reduce
from operator import or_
from typing import Any

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.evaluate import silent_equation
from loopax._src.core.jaxpr.util import Mask, either, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, Literal, Primitive, equations_in, inner_jaxprs

Dependence = Callable[[ClosedJaxpr], tuple[int, ...]]  # for each output, the set of the inputs it depends on
# For each primitive of loopax: equation, and the function for programs in it -> the same for each of its outputs.
dependence_rules: dict[Any, Callable[[Any, Dependence], list[int]]] = {}


@weakly_cached
def dependence(closed: ClosedJaxpr) -> tuple[int, ...]:
    """For each output, the set of inputs on which it depends; bit i stands for input i."""
    if jaxi.uses_references(closed):  # what is written to one comes from no result of an equation
        return ((1 << len(closed.invars)) - 1,) * len(closed.outvars)

    def results(eqn: Any, inputs: list[int]) -> list[int]:
        return _of_results(eqn, inputs, dependence)

    return tuple(propagated(closed, _each_its_own(closed), 0, results))


@weakly_cached
def tangent_dependence(closed: ClosedJaxpr) -> tuple[int, ...]:
    """For each output, the set of inputs on whose tangents its tangent may depend.

    Integers and bools have no tangents. So what a value decides (which branch, how many steps, which row) does not
    depend on its tangent.
    """
    if jaxi.uses_references(closed):
        return dependence(closed)

    def results(eqn: Any, inputs: list[int]) -> list[int]:
        if jaxi.stops_gradient(eqn):
            return [0] * len(eqn.outvars)
        found = zip(_of_results(eqn, inputs, tangent_dependence), eqn.outvars, strict=True)
        return [bits if bits and jaxi.has_tangents(variable.aval) else 0 for bits, variable in found]

    return tuple(propagated(closed, _each_its_own(closed), 0, results))


def _each_its_own(closed: ClosedJaxpr) -> list[int]:
    return [1 << i for i in range(len(closed.invars))]


def _of_results(eqn: Any, inputs: list[int], of_program: Dependence) -> list[int]:
    """The sets of the results of an equation, from those of its operands."""
    needed = of_equation(eqn, of_program)
    unions = {bits: union(inputs, bits) for bits in set(needed)}
    return [unions[bits] for bits in needed]


def propagated(
    closed: ClosedJaxpr, inputs: Sequence[Any], none: Any, results: Callable[..., Sequence[Any]]
) -> list[Any]:
    """A property of the outputs, from that of the inputs; constants have `none`, and what is computed of them alone."""
    found = dict(zip(closed.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return none if isinstance(atom, Literal) else found.get(atom, none)

    for eqn in closed.eqns:
        given = list(map(read, eqn.invars))
        if any(x != none for x in given):
            found.update(zip(eqn.outvars, results(eqn, given), strict=True))
    return list(map(read, closed.outvars))


def of_equation(eqn: Any, of_program: Dependence = dependence) -> list[int]:
    """For each output of an equation, the set of its inputs on which the output depends.

    `of_program` says it for the programs in it.
    """
    if eqn.primitive in dependence_rules:
        return dependence_rules[eqn.primitive](eqn, of_program)
    if program := jaxi.inlinable(eqn):
        return list(of_program(program))
    if loop := jaxi.lax_loop(eqn):  # JAX's rule would ask the primitives in it, once for each result
        operands = [1 << i for i in range(len(eqn.invars))]
        cond_consts, inputs = operands[: loop.num_cond_consts], operands[loop.num_cond_consts :]
        body, carry = of_program(loop.body), loop.carry_range
        ends = close_over_carry(body[: loop.num_carry], carry, inputs)
        inputs[carry.start : carry.stop] = ends
        goes_on = union([*cond_consts, *ends], of_program(loop.cond)[0]) if loop.cond else 0
        return [bits | goes_on for bits in (*ends, *(union(inputs, needed) for needed in body[loop.num_carry :]))]
    if jaxi.is_cond(eqn):
        return [1 | reduce(or_, needed) << 1 for needed in zip(*map(of_program, jaxi.branches(eqn)), strict=True)]
    everything = [(1 << len(eqn.invars)) - 1] * len(eqn.outvars)
    if len(everything) == 1:
        return everything
    if jaxi.happens(eqn.effects):  # no output depends on what they get
        eqn = silent_equation(eqn)
    outputs = range(len(eqn.outvars))
    used = [jaxi.used_inputs(eqn, [k == chosen for k in outputs]) for chosen in outputs]
    return [to_bits(mask) for mask in used if mask is not None] or everything


def to_bits(mask: Sequence[bool]) -> int:
    """A list of bools as a set."""
    return sum(1 << i for i, chosen in enumerate(mask) if chosen)


def members(bits: int) -> list[int]:
    """The elements of a set, in order."""
    return [i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]


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
    inverse: ClosedJaxpr | None = None,
    of_program: Dependence = dependence,
) -> Mask:
    """Which outputs of a loop's body get a property that flows from inputs to outputs.

    The carry is the body's first outputs, and its inputs at the positions `carry`: the least fixed
    point, in which a leaf that once had the property keeps it. It also flows through the `inverse`, a body with the
    same inputs that returns a carry. `of_program` says how it flows: `tangent_dependence` as tangents do.
    """
    needed = of_program(closed)
    back = of_program(inverse) if inverse else [0] * len(carry)
    steps = [bits | before for bits, before in zip(needed, back, strict=False)]
    ends = close_over_carry(steps, carry, list(map(int, inputs)))
    marked = to_bits([*inputs[: carry.start], *map(bool, ends), *inputs[carry.stop :]])
    return (*map(bool, ends), *(bool(bits & marked) for bits in needed[len(carry) :]))


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
        used = jaxi.dce(closed, [*needed, *others], False)[1]
        if inverse is not None:
            used = either(used, jaxi.dce(inverse, needed, False)[1])
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


def _follow(program: ClosedJaxpr, inputs: Axes) -> list[int | None]:
    """The axis of lanes of each result."""
    return propagated(program, inputs, None, _axes_of_results)


def _axes_of_results(eqn: Any, given: Axes) -> Axes:
    """The axis of lanes of each result of an equation of whose operands one has lanes."""
    if (program := jaxi.called(eqn)) is not None:
        return _follow(program, given)
    if jaxi.is_cond(eqn):
        found, *others = (_follow(branch, given[1:]) for branch in jaxi.branches(eqn))
        if any(other != found for other in others):
            raise MayMixLanesError
        return found
    if loop := jaxi.lax_loop(eqn):
        return _axes_of_loop(loop, given)
    if not eqn.outvars:  # an effect, of which no lane sees anything
        return []
    axis = None if eqn.effects or jaxi.draws_for_all_lanes(eqn) else jaxi.axis_after(eqn, given)
    if axis is None:
        raise MayMixLanesError
    return [axis] * len(eqn.outvars)


def _axes_of_loop(loop: jaxi.LaxLoop, given: Axes) -> Axes:
    """The axis of lanes of each result of a loop of JAX, of whose operands one has lanes."""
    _, consts, carry, xs = loop.groups(given)
    if not carry and all(axis is None for axis in consts) and all(axis in (0, None) for axis in xs):
        return [0] * len(loop.body.out_avals)  # a map over lanes, one after another
    if 0 in xs:
        raise MayMixLanesError
    x = [None if axis is None else axis - 1 for axis in xs]
    while True:  # to the fixed point: a leaf that all lanes share may come to differ
        found = _follow(loop.body, [*consts, *carry, *x])
        grown = [new if old is None else old for old, new in zip(carry, found, strict=False)]
        if grown == list(carry):
            break
        carry = grown
    if found[: len(carry)] != grown:
        raise MayMixLanesError
    return [*carry, *(None if axis is None else axis + 1 for axis in found[len(carry) :])]


# What a lane of a batch computes from the operands of other lanes: random bits of some PRNGs, rules of `custom_vmap`.
#
# JAX draws for a whole batch with the key of its first lane, where keys are of `rbg` or `unsafe_rbg`. So what a lane
# draws depends on its batch. It may not depend on more: a finished lane keeps the operands from which it would draw,
# with and without a derivative, and the batch stays as it is.


# For each primitive of loopax: equation -> which of its operands are mixed inside.
mixed_operands: dict[Primitive, Callable[[Any], Sequence[bool]]] = {}


@weakly_cached
def mixing_primitive(closed: ClosedJaxpr) -> str | None:
    """The name of a primitive in a program, or in programs inside, that mixes lanes; None if none does."""
    return next((eqn.primitive.name for eqn in equations_in(closed) if mixes_lanes(eqn)), None)


def mixes_lanes(eqn: Any) -> bool:
    """Whether a batch of an equation is more than the equation for each lane."""
    try:
        if (of_lanes := jaxi.custom_vmap_of_lanes(eqn)) is None:
            return jaxi.draws_for_all_lanes(eqn)
        program, inputs, results = of_lanes
        return _follow(program, inputs) != results
    except Exception:  # noqa: BLE001 - a user's rule may refuse this batch in any way: then nothing is known of it
        return True


def mixed_inputs(closed: ClosedJaxpr) -> Mask:
    """Which inputs of a program flow into what mixes lanes."""
    mixed = mixed_variables(closed)
    return tuple(variable in mixed for variable in closed.invars)


@weakly_cached
def mixed_variables(closed: ClosedJaxpr, seen: frozenset[int] = frozenset()) -> Set[Any]:
    """Which variables of a program flow into what mixes lanes, or into outputs that are `seen` by other lanes."""
    wanted = {v for k in seen if not isinstance(v := closed.outvars[k], Literal)}
    if not wanted and mixing_primitive(closed) is None:
        return wanted
    for eqn in reversed(closed.eqns):
        mixed = to_bits(operands_mixed_by(eqn))
        needed = zip(eqn.outvars, of_equation(eqn), strict=True) if wanted.intersection(eqn.outvars) else ()
        for variable, bits in needed:
            mixed |= bits if variable in wanted else 0
        wanted.update(eqn.invars[i] for i in members(mixed) if not isinstance(eqn.invars[i], Literal))
    return wanted


def operands_mixed_by(eqn: Any) -> Sequence[bool]:
    """Which operands of an equation are mixed, or flow into what mixes lanes inside of it."""
    everything = [True] * len(eqn.invars)
    if mixes_lanes(eqn):
        return everything
    if eqn.primitive in mixed_operands:
        return mixed_operands[eqn.primitive](eqn)
    if not any(map(mixing_primitive, inner_jaxprs(eqn))):
        return [False] * len(eqn.invars)
    if loop := jaxi.lax_loop(eqn):
        num, mixed, bits = loop.num_cond_consts, (), 0
        if loop.cond:
            mixed, (bits,) = mixed_inputs(loop.cond), dependence(loop.cond)
        deciding = [bool(bits >> i & 1) for i in range(len(mixed))]
        body = mixed_inputs_of_steps(loop.body, loop.carry_range, mixed[num:], deciding[num:])
        # Where the carry is mixed, so is what decides how many steps a lane takes.
        is_carry_mixed = any(body[i] for i in loop.carry_range)
        return [*(either(mixed[:num], deciding[:num]) if is_carry_mixed else mixed[:num]), *body]
    if jaxi.is_cond(eqn):
        return [False, *map(any, zip(*map(mixed_inputs, jaxi.branches(eqn)), strict=True))]
    program = jaxi.called(eqn)
    return everything if program is None else mixed_inputs(program)


def mixed_inputs_of_steps(
    body: ClosedJaxpr, carry: range, also: Sequence[bool] = (), deciding: Sequence[bool] = ()
) -> Mask:
    """Which inputs of a loop's body flow into what mixes lanes, in any number of steps.

    The carry is the body's first outputs, and its inputs at the positions `carry`; `also` says which leaves of it are
    mixed outside of the body, `deciding` which decide on the number of steps. These are mixed where any leaf is: what
    other lanes see of a lane depends on how many steps it has taken.
    """
    mixed, needed = to_bits(mixed_inputs(body)) | to_bits(also) << carry.start, dependence(body)
    while True:
        leaves = [i for i in carry if mixed >> i & 1]
        grown = mixed | (to_bits(deciding) << carry.start if leaves else 0)
        grown = reduce(or_, (needed[i - carry.start] for i in leaves), grown)
        if grown == mixed:
            return tuple(bool(mixed >> i & 1) for i in range(len(body.in_avals)))
        mixed = grown


# What loopax's own primitives say of themselves to who asks about a program: registered by each.


# What an equation computes, where that is not all of its results.
computed: dict[Primitive, Callable[[Any], Sequence[Any]]] = {}
# Of loops: the limit on their steps, and whether it is loose: perhaps far above the steps that are taken.
step_limits: dict[Primitive, Callable[[Any], tuple[int | None, bool]]] = {}
# Of loops: whether a lane that has finished can be kept from taking a step (`core/stopped_loops.py`).
stoppable: dict[Primitive, Callable[[Any], bool]] = {}
# Operations on arrays, whose time no value makes longer.
arithmetic: set[Primitive] = set()


# What programs are said to be: whether they end, or are a few elementwise operations.

_FEW = 40  # equations


def always_ends(jaxpr: ClosedJaxpr) -> bool:
    """Whether a program has no effects, and no loop in it whose number of steps has no bound."""
    return not jaxpr.effects and all(
        not (jaxi.is_while(eqn) or (eqn.primitive in step_limits and step_limits[eqn.primitive](eqn)[0] is None))
        and all(map(always_ends, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def is_arithmetic(jaxpr: ClosedJaxpr) -> bool:
    """Whether a program is operations on arrays, whose time no value makes longer; an unknown operation is none.

    So is a loop that a lane does not enter where it has finished, but in a function with derivatives of its own: what
    is in its rules cannot be told whether it is to be entered.
    """

    def holds_arithmetic(eqn: Any) -> bool:
        if eqn.primitive in stoppable:
            return stoppable[eqn.primitive](eqn)
        if jaxi.is_custom(eqn) and any(
            inner.primitive in stoppable for program in inner_jaxprs(eqn) for inner in equations_in(program)
        ):
            return False
        return jaxi.is_scan(eqn) or jaxi.is_cond(eqn) or jaxi.called(eqn) is not None

    return not jaxpr.effects and all(
        all(map(is_arithmetic, inner_jaxprs(eqn)))
        if holds_arithmetic(eqn)
        else eqn.primitive in arithmetic or jaxi.is_elementwise_operation(eqn) or jaxi.is_reduction_or_move(eqn)
        for eqn in jaxpr.eqns
    )


def is_elementwise(closed: ClosedJaxpr) -> bool:
    """Whether a jaxpr is a few elementwise operations, which XLA fuses with what is around them."""
    return (
        not closed.effects
        and len(closed.eqns) <= _FEW
        and all(
            jaxi.is_elementwise_operation(eqn) if program is None else is_elementwise(program)
            for eqn, program in zip(closed.eqns, map(jaxi.inlinable, closed.eqns), strict=True)
        )
    )
