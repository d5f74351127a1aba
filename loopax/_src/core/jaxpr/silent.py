"""Programs without effects."""

from collections.abc import Callable
from typing import Any

import jax

from loopax._src.core.jaxpr.custom_rules import Interpreter, evaluated_by
from loopax._src.core.jaxpr.util import inner_programs, map_programs
from loopax._src.jax_internals import (
    ClosedJaxpr,
    branches,
    equation_context,
    happens,
    is_cond,
    is_custom,
    is_linear_solve,
    jaxpr_as_fun,
    with_branches,
    with_solve,
)


def silent(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop effectful equations without results (debug prints)."""
    if not closed.effects:
        return closed
    jaxpr, eqns = closed.jaxpr, []
    for eqn in jaxpr.eqns:
        if not eqn.effects:
            eqns.append(eqn)
        elif eqn.outvars:
            eqns.append(silent_equation(eqn))
    effects = set().union(*(eqn.effects for eqn in eqns))
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, effects=effects), closed.consts)  # type: ignore[attr-defined]


def silent_equation(eqn: Any) -> Any:
    """The equation with `silent` programs inside it."""
    if is_linear_solve(eqn):
        return with_solve(eqn, silent)
    if is_cond(eqn):
        return with_branches(eqn, list(map(silent, branches(eqn))))
    if is_custom(eqn):
        return _silent_custom(eqn)
    pruned = map_programs(eqn, silent)
    programs = list(inner_programs(pruned))
    if not programs:  # an `io_callback`, say, which goes if nothing needs its results
        return eqn.replace(effects=frozenset()) if happens(eqn.effects) else eqn
    return pruned.replace(effects=set().union(*(program.effects for program in programs)))


def _silent_custom(eqn: Any) -> Any:
    """The call, which is silent where a derivative evaluates its rule. Steps back are not repeated, so they are not."""
    with equation_context(eqn):
        traced = jax.make_jaxpr(evaluated_by(_SILENT, eqn))(*(v.aval for v in eqn.invars))
    (call,) = traced.jaxpr.eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars)


def _evaluated_in_silence(closed: ClosedJaxpr) -> Callable[..., Any]:
    return jaxpr_as_fun(silent(closed))


_SILENT = Interpreter(_evaluated_in_silence, jaxpr_as_fun, num_flags=0)
