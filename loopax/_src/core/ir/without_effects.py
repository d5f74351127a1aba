"""Programs without effects: recomputed steps do not repeat these."""

from typing import Any

from loopax._src.core.ir.strip_progress import strip_progress
from loopax._src.core.jaxpr.util import inner_programs, map_programs
from loopax._src.jax_internals import ClosedJaxpr, branches, happens, is_cond, with_branches


def without_effects(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop effectful equations without results (debug prints) and progress: recomputed steps do not repeat these."""
    closed = strip_progress(closed)
    if not closed.effects:
        return closed
    jaxpr, eqns = closed.jaxpr, []
    for eqn in jaxpr.eqns:
        if not eqn.effects:
            eqns.append(eqn)
        elif eqn.outvars:
            eqns.append(_equation_without_effects(eqn))
    effects = set().union(*(eqn.effects for eqn in eqns))
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, effects=effects), closed.consts)  # type: ignore[attr-defined]


def _equation_without_effects(eqn: Any) -> Any:
    """The equation with `without_effects` of the jaxprs inside it."""
    if is_cond(eqn):
        return with_branches(eqn, list(map(without_effects, branches(eqn))))
    pruned = map_programs(eqn, without_effects)
    programs = list(inner_programs(pruned))
    if not programs:  # an `io_callback`, say, which goes if nothing needs its results
        return eqn.replace(effects=frozenset()) if happens(eqn.effects) else eqn
    return pruned.replace(effects=set().union(*(program.effects for program in programs)))
