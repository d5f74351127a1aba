"""What a step roughly costs: the arithmetic of a jaxpr, in the time that it takes to store a byte and to read it again.

Fitted on CPUs (docs/benchmark.md has the programs): a byte of main memory takes as long as 50 operations of a
matrix product, 7 elementwise ones, or two thirds of a transcendental function. On a GPU all are a thousand
times as fast, and their ratios similar. It is for choices between alternatives that differ by more than 15 %.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from loopax._src.core.jaxpr.util import inner_jaxprs
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Primitive,
    Scan,
    called,
    contracted_size,
    inlinable,
    is_cond,
    is_convolution,
    is_elementwise_operation,
    is_free,
    is_product,
    is_reduction_or_move,
    is_scan,
    is_transcendental,
    is_while,
)

IN_MEMORY = 1.0  # per byte stored and read again
IN_CACHE = 0.45
CACHE_BYTES = 32 * 2**20
PRODUCT = 0.02  # per multiplication or addition of a matrix product or a convolution
ELEMENTWISE = 0.15  # per element
FUNCTION = 1.5

_FEW = 40  # equations
_UNKNOWN_LENGTH = 10  # iterations of a loop inside the step whose length is not known

# For loopax's own primitives: what an equation computes, where that is not all of its results; and, for those with
# bodies, the limit on their steps and whether it is loose: perhaps far above the steps that are taken.
computed: dict[Primitive, Callable[[Any], Sequence[Any]]] = {}
step_limits: dict[Primitive, Callable[[Any], tuple[int | None, bool]]] = {}


def storing(num_bytes: float, in_all: float) -> float:
    """Storing so many bytes per step and reading them again, if there are so many in all."""
    return num_bytes * (IN_CACHE if in_all <= CACHE_BYTES else IN_MEMORY)


def arithmetic(closed: ClosedJaxpr) -> float:
    """Evaluating a jaxpr once."""
    return _equations(closed.jaxpr)


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


def _equations(jaxpr: Any) -> float:
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: Any) -> float:
    if inner := list(inner_jaxprs(eqn)):
        costs = [_equations(jaxpr) for jaxpr in inner]
        return max(costs) if is_cond(eqn) else _iterations(eqn) * sum(costs)
    size = sum(prod(v.aval.shape) for v in _computed(eqn))
    if is_product(eqn):
        return PRODUCT * 2 * size * contracted_size(eqn)
    if is_convolution(eqn):
        kernel = eqn.invars[1].aval.shape
        return PRODUCT * 2 * size * prod(kernel) / max(eqn.outvars[0].aval.shape[1], 1)
    if is_free(eqn):
        return 0.0
    return size * (FUNCTION if is_transcendental(eqn) else ELEMENTWISE)


def _computed(eqn: Any) -> Sequence[Any]:
    rule = computed.get(eqn.primitive)
    return eqn.outvars if rule is None else rule(eqn)


def _iterations(eqn: Any) -> int:
    """How often a loop runs its body; 1 for what is no loop."""
    if is_scan(eqn):
        return Scan.of(eqn).length
    if is_while(eqn):
        return _UNKNOWN_LENGTH
    if eqn.primitive not in step_limits:
        return 1
    limit, is_loose = step_limits[eqn.primitive](eqn)
    limit = limit or _UNKNOWN_LENGTH
    return min(limit, _UNKNOWN_LENGTH) if is_loose else limit
