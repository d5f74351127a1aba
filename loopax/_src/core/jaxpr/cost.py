"""What a step roughly costs, in nanoseconds: the arithmetic of a jaxpr, times the constants of a machine.

It is for choices between alternatives that differ by more than 15 %.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from loopax._src.core.jaxpr.costs import costs
from loopax._src.core.jaxpr.own_primitives import computed, step_limits
from loopax._src.core.jaxpr.util import inner_jaxprs
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    Scan,
    contracted_size,
    convolved_size,
    is_cond,
    is_convolution,
    is_free,
    is_function,
    is_product,
    is_scan,
    is_slow_function,
    is_while,
    stands_alone,
    takes_fused,
)

# Of a batch of lanes, beside the constants of `Costs` (docs/benchmark.md).
VECTOR_PRODUCT = 2.0  # a product of a matrix and a vector, beside one of matrices of the same arithmetic
CALL_OF_BATCH = 12.0  # an operation that XLA executes by itself, on an array of all lanes; in `Costs.call`
CALL_ALONE = 0.4  # and on that of one lane
STEP_ALONE = 0.04  # a step of one lane, in `Costs.step`
CHEAP_STEP = 330  # elements
SPREAD_STEP = 330_000  # elements, of a batch: XLA computes them on several cores

_UNKNOWN_LENGTH = 10  # iterations of a loop inside the step whose length is not known


def arithmetic(closed: ClosedJaxpr) -> float:
    """Evaluating a jaxpr once, if its operations are fused with others."""
    return _total(closed.jaxpr.eqns, _operation)


def evaluation(closed: ClosedJaxpr) -> float:
    """Evaluating a jaxpr once."""
    return arithmetic(closed) + costs().call * _total(closed.jaxpr.eqns, _runs_by_itself)


class StepCost(NamedTuple):
    """What a step of a batch costs, measured on CPUs (docs/benchmark.md): roughly `of_batch + lanes * of_lane`."""

    of_lane: float
    of_batch: float  # however many lanes there are
    alone: float  # a step of one lane without a batch

    @property
    def is_cheap(self) -> bool:
        """Whether it is some elementwise operations on a few numbers."""
        return self.of_lane < CHEAP_STEP * costs().elementwise

    def is_spread(self, lanes: int) -> bool:
        """Whether XLA computes a step of so many lanes on several cores of a CPU."""
        return not self.of_batch and lanes * self.of_lane > SPREAD_STEP * costs().elementwise


def step_cost(body: ClosedJaxpr, num_consts: int) -> StepCost:
    """The cost of a step, from the body of one lane: (row, *consts, *others) -> ...

    What depends on constants alone is computed once.
    """
    eqns = _varying(body, num_consts)
    work, products, calls = (_total(eqns, of) for of in (_operation, _product, _runs_by_itself))
    calls *= costs().call
    alone = work + (VECTOR_PRODUCT - 1) * products + CALL_ALONE * calls + STEP_ALONE * costs().step
    return StepCost(work, CALL_OF_BATCH * calls, alone)


def _varying(body: ClosedJaxpr, num_consts: int) -> list[Any]:
    """The equations that are not computed from constants alone."""
    changing = {*body.jaxpr.invars[:1], *body.jaxpr.invars[1 + num_consts :]}
    found = []
    for eqn in body.jaxpr.eqns:
        if any(not isinstance(atom, Literal) and atom in changing for atom in eqn.invars):
            changing.update(eqn.outvars)
            found.append(eqn)
    return found


def _total(eqns: Sequence[Any], of_operation: Callable[[Any], float]) -> float:
    """What equations amount to: the sum over their operations, also over those of programs in them."""
    return sum(_amount(eqn, of_operation) for eqn in eqns)


def _amount(eqn: Any, of_operation: Callable[[Any], float]) -> float:
    inner = list(inner_jaxprs(eqn))
    if not inner:
        return of_operation(eqn)
    amounts = [_total(jaxpr.eqns, of_operation) for jaxpr in inner]
    return max(amounts) if is_cond(eqn) else _iterations(eqn) * sum(amounts)


def _product(eqn: Any) -> float:
    """The cost of a product; nothing for others."""
    return _operation(eqn) if is_product(eqn) else 0.0


def _runs_by_itself(eqn: Any) -> float:
    """1 for an operation that XLA executes by itself."""
    return float(stands_alone(eqn) or takes_fused(eqn))


def _operation(eqn: Any) -> float:
    """The cost of an operation that holds no program."""
    size = sum(prod(v.aval.shape) for v in _computed(eqn))
    if is_product(eqn):
        return costs().product * 2 * size * contracted_size(eqn)
    if is_convolution(eqn):
        return costs().convolution * 2 * size * convolved_size(eqn)
    if is_free(eqn):
        return 0.0
    return size * _of_element(eqn)


def _of_element(eqn: Any) -> float:
    if is_slow_function(eqn):
        return costs().slow_function
    return costs().function if is_function(eqn) else costs().elementwise


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
