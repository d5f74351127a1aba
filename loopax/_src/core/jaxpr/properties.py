"""What programs are said to be: whether they end, are a few elementwise operations, or can be transposed."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from loopax._src.core.jaxpr.own_primitives import jointly_linear, step_limits
from loopax._src.core.jaxpr.util import inner_jaxprs, select
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    called,
    can_transpose,
    inlinable,
    is_cond,
    is_elementwise_operation,
    is_reduction_or_move,
    is_scan,
    is_while,
)

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
        return linear_results(program.jaxpr, operands)
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
    return not closed.effects and len(closed.jaxpr.eqns) <= _FEW and all(map(_is_elementwise, closed.jaxpr.eqns))


def _is_elementwise(eqn: Any) -> bool:
    program = inlinable(eqn)
    return is_elementwise_operation(eqn) if program is None else is_elementwise(program)
