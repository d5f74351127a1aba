"""What programs are said to be: whether they end, and whether they are a few elementwise operations."""

from typing import Any

from loopax._src.core.jaxpr.own_primitives import step_limits
from loopax._src.core.jaxpr.util import inner_jaxprs
from loopax._src.jax_internals import (
    ClosedJaxpr,
    called,
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
