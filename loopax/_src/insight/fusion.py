"""Which values of a program XLA writes to memory, and which only live inside of a fused operation."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from loopax._src.jax_internals import Literal, is_costly, renames, stands_alone, takes_fused


def is_fusible(eqn: Any) -> bool:
    """Whether an equation may be computed inside of another."""
    return not (takes_fused(eqn) or stands_alone(eqn) or renames(eqn))


def fused_into(eqns: Sequence[Any], users: Mapping[Any, Sequence[int]], results: Container[Any]) -> list[set[int]]:
    """For each equation, the places of those inside of which it is computed; its own where its results are written.

    `users` are the places of the equations that use a variable, `results` those that the program returns.
    """
    found: list[set[int]] = [set() for _ in eqns]
    for place in reversed(range(len(eqns))):
        eqn = eqns[place]
        using = [other for variable in eqn.outvars for other in users.get(variable, ())]
        takers = [other for other in using if is_fusible(eqns[other]) or takes_fused(eqns[other])]
        into = set().union(*(found[other] for other in takers))
        is_written = (
            not is_fusible(eqn)
            or len(takers) < len(using)
            or any(variable in results for variable in eqn.outvars)
            or (len(into) > 1 and is_costly(eqn))
        )
        found[place] = {place} if is_written or not into else into
    return found


def variables(eqn: Any) -> list[Any]:
    """What an equation reads, constants apart."""
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]
