"""Residuals: what the known part of a body hands to its unknown part. Not all of them have to be stored."""

from collections.abc import Iterable, Sequence
from sys import maxsize
from typing import Any, NamedTuple

from loopax._src.core.jaxpr.cost import arithmetic
from loopax._src.core.jaxpr.costs import costs
from loopax._src.core.jaxpr.dataflow import dependence, members
from loopax._src.core.jaxpr.properties import always_ends
from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.jax_internals import ClosedJaxpr, Literal, dce, replace_jaxpr

# To recompute a residual. Looking for more would take long where there are many residuals.
MOST_EQUATIONS = 32


class Residual(NamedTuple):
    """Where the unknown part finds a residual."""

    hoisted: bool  # the same at every step
    forwarded: int | None  # a row of this known x as it is
    position: int  # among the outputs of the known body


def classified(
    known: ClosedJaxpr, sizes: Sequence[int], positions: Sequence[int], at_most_once: bool = False
) -> list[Residual]:
    """The residuals at these positions among the outputs of (row, *consts, *carry, *x) -> ...; `sizes` of the three.

    `at_most_once`: the step is taken once or not at all, so nothing is gained if what it computes is hoisted.
    """
    num_consts, num_carry, num_xs = sizes
    consts, first_x = range(1, 1 + num_consts), 1 + num_consts + num_carry
    inputs = known.jaxpr.invars[first_x : first_x + num_xs]
    candidates = [p for p in positions if all(i in consts for i in members(dependence(known)[p]))]
    # A loop may take no step. What is hoisted is computed all the same, so it must come to an end and have no effects.
    programs = {p: _program_of(known, p).jaxpr for p in _computed_from(known, consts, candidates)}
    hoisted = [p for p, jaxpr in programs.items() if (not jaxpr.eqns if at_most_once else always_ends(jaxpr))]

    def classify(position: int) -> Residual:
        same = [i for i, variable in enumerate(inputs) if variable is known.jaxpr.outvars[position]]
        return Residual(position in hoisted, None if position in hoisted or not same else same[0], position)

    return list(map(classify, positions))


def _computed_from(known: ClosedJaxpr, inputs: range, positions: list[int]) -> list[int]:
    """The outputs that can be computed from these inputs: an equation that they stand in may be all or nothing."""

    def suffice(positions: list[int]) -> bool:
        used = dce(known, [p in positions for p in range(len(known.out_avals))], False)[1]
        return all(i in inputs for i, needed in enumerate(used) if needed)

    return positions if suffice(positions) else [p for p in positions if suffice([p])]


def _program_of(known: ClosedJaxpr, position: int) -> ClosedJaxpr:
    return dce(known, [p == position for p in range(len(known.out_avals))], False)[0]


def hoisted_part(known: ClosedJaxpr, num_consts: int, positions: Sequence[int]) -> ClosedJaxpr | None:
    """Known consts -> residuals that depend on nothing else."""
    if not positions:
        return None
    wanted = [p in positions for p in range(len(known.out_avals))]
    is_const = [0 < i <= num_consts for i in range(len(known.in_avals))]
    return dce(known, wanted, is_const)[0]


def without_recomputed(
    known: ClosedJaxpr, given: Sequence[int], positions: Sequence[int], hoisted: Sequence[int]
) -> tuple[list[int], ClosedJaxpr | None]:
    """Leave out residuals that cost less to compute from the others than to store: `1 - t` where `t` is stored.

    Those that are the same at every step, at `hoisted`, are left out if they cost nothing (a transpose, zeros, a
    number: an output that is a literal). Among the outputs of `known`, residuals are at `positions`; its inputs at
    `given` need not be stored. Returns the positions that are left, and how the others are computed:
    (*given, *left) -> others, in their order.
    """
    if num_bytes(known.out_avals) == maxsize:  # what they cost is not known
        return list(positions), None
    jaxpr = known.jaxpr
    producers = {variable: i for i, eqn in enumerate(jaxpr.eqns) for variable in eqn.outvars}
    inputs = [jaxpr.invars[i] for i in given]
    left, equations = [p for p in positions if not isinstance(jaxpr.outvars[p], Literal)], list[Any]()
    for position in sorted(left, key=lambda p: -num_bytes([known.out_avals[p]])):
        others = [jaxpr.outvars[p] for p in left if p != position]
        residual = jaxpr.outvars[position]
        places = _equations_for(residual, jaxpr.eqns, producers, {*inputs, *others})
        if places is None:
            continue
        needed = [jaxpr.eqns[i] for i in places]
        cost = arithmetic(replace_jaxpr(known, [*inputs, *others], [residual], needed))
        if cost <= (0.0 if position in hoisted else costs().cached_byte * num_bytes([residual.aval])):
            left.remove(position)
            equations += [eqn for eqn in needed if not any(eqn is other for other in equations)]
    if len(left) == len(positions):
        return left, None
    kept = [jaxpr.outvars[p] for p in left]
    dropped = [jaxpr.outvars[p] for p in positions if p not in left]
    in_order = [eqn for eqn in jaxpr.eqns if any(eqn is other for other in equations)]
    return left, replace_jaxpr(known, [*inputs, *kept], dropped, in_order)


def _equations_for(
    variable: Any, equations: Sequence[Any], producers: dict[Any, int], given: set[Any]
) -> list[int] | None:
    """The places of the equations that compute a variable from given ones; None: it needs others, too, or many."""
    found, needed = set[int](), {variable}
    while needed:
        place = producers.get(needed.pop())
        if place is None or equations[place].effects or len(found) == MOST_EQUATIONS:
            return None
        found.add(place)
        needed.update(_variables(equations[place].invars) - given - set(equations[place].outvars))
        needed = {v for v in needed if producers.get(v) not in found}
    return sorted(found)


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}
