"""What a step roughly costs: the arithmetic of a jaxpr, in the time that it takes to store a byte and to read it again.

Fitted on CPUs (docs/benchmark.md has the programs): a byte of main memory takes as long as 50 operations of a
matrix product, 7 elementwise ones, or two thirds of a transcendental function. On a GPU all are a thousand
times as fast, and their ratios similar. It is for choices between alternatives that differ by more than 15 %.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from loopax._src.core.jaxpr.util import inner_jaxprs
from loopax._src.jax_internals import ClosedJaxpr

IN_MEMORY = 1.0  # per byte stored and read again
IN_CACHE = 0.45
CACHE_BYTES = 32 * 2**20
PRODUCT = 0.02  # per multiplication or addition of a matrix product or a convolution
ELEMENTWISE = 0.15  # per element
FUNCTION = 1.5

_FREE = {"reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "stop_gradient", "copy", "iota"}
_FREE |= {"pvary", "retyped"}  # types of the devices of a `shard_map`
_FUNCTIONS = {"exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "cbrt", "erf", "erfc", "erf_inv", "lgamma"}
_FUNCTIONS |= {"sin", "cos", "tan", "asin", "acos", "atan", "atan2"}
_FUNCTIONS |= {"sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "digamma", "random_bits", "threefry2x32"}
_UNKNOWN_LENGTH = 10  # iterations of a loop inside the step whose length is not known


def storing(num_bytes: float, in_all: float) -> float:
    """Storing so many bytes per step and reading them again, if there are so many in all."""
    return num_bytes * (IN_CACHE if in_all <= CACHE_BYTES else IN_MEMORY)


def arithmetic(closed: ClosedJaxpr) -> float:
    """Evaluating a jaxpr once."""
    return _equations(closed.jaxpr)


def _equations(jaxpr: Any) -> float:
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: Any) -> float:
    name = eqn.primitive.name
    if inner := list(inner_jaxprs(eqn)):
        costs = [_equations(jaxpr) for jaxpr in inner]
        return max(costs) if name == "cond" else _iterations(eqn) * sum(costs)
    size = sum(prod(v.aval.shape) for v in _changed(eqn))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return PRODUCT * 2 * size * prod(eqn.invars[0].aval.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return PRODUCT * 2 * size * prod(kernel) / max(eqn.outvars[0].aval.shape[1], 1)
    if name in _FREE:
        return 0.0
    return size * (FUNCTION if name in _FUNCTIONS else ELEMENTWISE)


def _changed(eqn: Any) -> Sequence[Any]:
    """What an equation computes: of a buffer, one row."""
    if eqn.primitive.name in ("buffer_get", "buffer_take"):
        return eqn.outvars[:1]
    return eqn.invars[2:3] if eqn.primitive.name in ("buffer_put", "buffer_add") else eqn.outvars


def _iterations(eqn: Any) -> int:
    """How often a loop runs its body; 1 for what is no loop."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "while":
        return _UNKNOWN_LENGTH
    if "bound" not in eqn.params:
        return 1
    bound = eqn.params["bound"] or _UNKNOWN_LENGTH
    # The bound of a loop with a condition is a precaution, and may be far above the steps that are taken.
    return min(bound, _UNKNOWN_LENGTH) if eqn.params.get("predicated") else bound
