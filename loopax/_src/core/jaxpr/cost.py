"""What a step roughly costs: the arithmetic of a jaxpr, in the time that it takes to store a byte and to read it again.

Fitted on CPUs (docs/benchmark.md has the programs): a byte of main memory takes as long as 50 operations of a
matrix product, 7 elementwise ones, or two thirds of a transcendental function. On a GPU all are a thousand
times as fast, and their ratios similar. It is for choices between alternatives that differ by more than 15 %.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from loopax._src.core.jaxpr.util import inner_jaxprs
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
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
    stands_alone,
    takes_fused,
)

IN_MEMORY = 1.0  # per byte stored and read again
IN_CACHE = 0.45
CACHE_BYTES = 32 * 2**20
PRODUCT = 0.02  # per multiplication or addition of a matrix product or a convolution
ELEMENTWISE = 0.15  # per element
FUNCTION = 1.5
PRODUCT_ALONE = 0.04  # of a matrix and a vector: a batch of vectors is a product of matrices, which is faster
CALL = 1600.0  # an operation that XLA executes by itself, such as a product, on an array of all lanes
CALL_ALONE = 60.0  # and on that of one lane
STEP_ALONE = 20.0  # a step of one lane
CHEAP_STEP = 64.0

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
    return _total(closed.jaxpr.eqns, _operation)


class StepCost(NamedTuple):
    """What a step of a batch costs, measured on CPUs (docs/benchmark.md): roughly `of_batch + lanes * of_lane`."""

    of_lane: float
    of_batch: float  # however many lanes there are
    alone: float  # a step of one lane without a batch

    @property
    def is_cheap(self) -> bool:
        """Whether it is some elementwise operations on a few numbers."""
        return self.of_lane < CHEAP_STEP


def step_cost(body: ClosedJaxpr, num_consts: int) -> StepCost:
    """The cost of a step, from the body of one lane: (row, *consts, *others) -> ...

    What depends on constants alone is computed once.
    """
    eqns = _varying(body, num_consts)
    work, products, calls = (_total(eqns, of) for of in (_operation, _product, _runs_by_itself))
    alone = work + (PRODUCT_ALONE / PRODUCT - 1) * products + CALL_ALONE * calls + STEP_ALONE
    return StepCost(work, CALL * calls, alone)


def _varying(body: ClosedJaxpr, num_consts: int) -> list[Any]:
    """The equations that are not computed from constants alone."""
    changing = {*body.jaxpr.invars[:1], *body.jaxpr.invars[1 + num_consts :]}
    found = []
    for eqn in body.jaxpr.eqns:
        if any(not isinstance(atom, Literal) and atom in changing for atom in eqn.invars):
            changing.update(eqn.outvars)
            found.append(eqn)
    return found


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
