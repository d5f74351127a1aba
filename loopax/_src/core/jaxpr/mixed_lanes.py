"""What a lane of a batch computes from the operands of other lanes: random bits of some PRNGs, rules of `custom_vmap`.

JAX draws for a whole batch with the key of its first lane, where keys are of `rbg` or `unsafe_rbg`. So what a lane
draws depends on its batch. It may not depend on more: a finished lane keeps the operands from which it would draw, with
and without a derivative, and the batch stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

from loopax._src.core.jaxpr.dataflow import dependence, members, of_equation, to_bits
from loopax._src.core.jaxpr.lanewise import keeps_lanes_apart
from loopax._src.core.jaxpr.util import Mask, either, inner_jaxprs, split_list, weakly_cached
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    Primitive,
    Scan,
    While,
    branches,
    called,
    custom_vmap_rule,
    draws_for_all_lanes,
    is_cond,
    is_scan,
    is_while,
)

# For each primitive of loopax: equation -> which of its operands are mixed inside.
mixed_operands: dict[Primitive, Callable[[Any], Sequence[bool]]] = {}


def mixing_primitive(closed: ClosedJaxpr) -> str | None:
    """The name of a primitive in a program, or in programs inside, that mixes lanes; None if none does."""
    return _mixing_primitive(closed.jaxpr)


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
        return (False,) * len(closed.jaxpr.invars)
    wanted = set[Any]()
    for eqn in reversed(closed.jaxpr.eqns):
        mixed = to_bits(_mixed_operands(eqn))
        needed = zip(eqn.outvars, of_equation(eqn), strict=True) if wanted.intersection(eqn.outvars) else ()
        for variable, bits in needed:
            mixed |= bits if variable in wanted else 0
        wanted.update(eqn.invars[i] for i in members(mixed) if not isinstance(eqn.invars[i], Literal))
    return tuple(variable in wanted for variable in closed.jaxpr.invars)


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
        return mixed_inputs_of_steps(Scan.of(eqn).body, range(Scan.of(eqn).num_consts, sum(Scan.of(eqn).sizes)))
    if is_while(eqn):
        return _while(While.of(eqn))
    if is_cond(eqn):
        return [False, *map(any, zip(*map(mixed_inputs, branches(eqn)), strict=True))]
    program = called(eqn)
    return everything if program is None else mixed_inputs(program)


def _while(loop: While) -> Sequence[bool]:
    carry = range(loop.num_consts, loop.num_consts + loop.num_carry)
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
