"""Programs without effects: a step that is recomputed does not print again."""

from typing import Any

import jax

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.evaluate import evaluated_by
from loopax._src.core.jaxpr.util import inner_jaxprs, map_programs
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun


def silent(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop effectful equations without results (debug prints)."""
    if not closed.effects:
        return closed
    silenced = (silent_equation(eqn) if eqn.effects else eqn for eqn in closed.eqns if eqn.outvars or not eqn.effects)
    return jaxi.replace_jaxpr(closed, closed.invars, closed.outvars, list(silenced))


def silent_equation(eqn: Any) -> Any:
    """The equation with `silent` programs inside it."""
    if jaxi.is_linear_solve(eqn):
        return jaxi.with_solve(eqn, silent)
    if jaxi.is_custom(eqn):
        # The call is silent where a derivative evaluates its rule. Steps back are not repeated, so they are not.
        function = evaluated_by(lambda closed: jaxpr_as_fun(silent(closed)), jaxpr_as_fun, 0, eqn)
        with jaxi.equation_context(eqn):
            traced = jax.make_jaxpr(function)(*(v.aval for v in eqn.invars))
        (call,) = traced.eqns
        return call.replace(invars=eqn.invars, outvars=eqn.outvars)
    pruned = map_programs(eqn, silent)
    programs = list(inner_jaxprs(pruned))
    if not programs:  # an `io_callback`, say, which goes if nothing needs its results
        return eqn.replace(effects=frozenset()) if jaxi.happens(eqn.effects) else eqn
    return pruned.replace(effects=set().union(*(program.effects for program in programs)))
