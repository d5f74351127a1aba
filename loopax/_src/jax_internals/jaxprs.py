"""Jaxprs: with other inputs, outputs or equations, with constants as inputs, without dead code."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval as pe


def replace_jaxpr(
    closed: ClosedJaxpr, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any] | None = None
) -> ClosedJaxpr:
    """A jaxpr with other inputs and outputs, and other equations if given. It loses the names of its arguments."""
    jaxpr = closed.jaxpr
    debug_info = jaxpr.debug_info.with_unknown_names()  # type: ignore[attr-defined]
    changes: dict[str, Any] = {"invars": list(invars), "outvars": list(outvars), "debug_info": debug_info}
    if eqns is not None:
        changes |= {"eqns": list(eqns), "effects": set().union(*(eqn.effects for eqn in eqns))}
    return ClosedJaxpr(jaxpr.replace(**changes), closed.consts)  # type: ignore[attr-defined]


def open_constants(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr with its constants as first inputs, and the constants.

    `jax.closure_convert` does this for arrays that are perturbed only, and not for integers.
    """
    jaxpr = closed.jaxpr
    invars, consts = [*jaxpr.constvars, *jaxpr.invars], list(closed.consts)
    debug_info = jaxpr.debug_info.with_unknown_names()  # type: ignore[attr-defined]
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars, debug_info=debug_info), []), consts  # type: ignore[attr-defined]


def dce(closed: ClosedJaxpr, used: Sequence[bool], keep: Sequence[bool] | bool) -> tuple[ClosedJaxpr, list[bool]]:
    """Remove what the used outputs do not need; inputs marked in `keep` stay.

    The type of `jaxpr` under a ClosedJaxpr changed in 0.12, where both are one class.
    """
    jaxpr, used_inputs = pe.dce_jaxpr(closed.jaxpr, list(used), keep if isinstance(keep, bool) else list(keep))
    return ClosedJaxpr(jaxpr, closed.consts), list(used_inputs)
