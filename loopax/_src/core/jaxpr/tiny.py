"""Tiny steps: whether XLA's CPU backend compiles a loop to one function, whose operations cost no calls.

It does where an iteration touches less than a kilobyte, counted after operations are fused. How they are fused
is not known where a loop is traced. So the limits are on what is known, the bytes of the results of all operations
but moves. They were fitted on random differential equations (`benchmarks/tiny_loops.py`).
"""

from math import inf
from typing import Any

import jax

from loopax._src.core.jaxpr.costs import costs
from loopax._src.core.jaxpr.util import inner_jaxprs, num_bytes
from loopax._src.jax_internals import ClosedJaxpr, called, is_free, moves, stands_alone

MOST_OF_VALUE = 1100  # bytes of results of a step
MOST_STORING = 760  # of a step whose residuals are stored, with four times what is stored
MOST_FROM_CARRIES = 780  # of the derivative of a step
MOST_FROM_RESIDUALS = 690
BYTES_OF_CALL = 40  # of results, for each call of a step that is not one function
STEP = 10.0  # nanoseconds of a step of one function, on top of its operations
ROW = 3.0  # and of an array that is stored


def is_tiny(step: ClosedJaxpr) -> bool:
    """Whether a loop of this step is one function, if nothing is stored."""
    return result_bytes(step.jaxpr) <= MOST_OF_VALUE and jax.default_backend() == "cpu"


def calls(step: ClosedJaxpr, most: int, stored: int = 0) -> float:
    """Nanoseconds that the calls of a step take; none where it has so few bytes of results, at most."""
    touched = result_bytes(step.jaxpr) + 4 * stored
    return 0.0 if touched <= most else costs().call * touched / BYTES_OF_CALL


def result_bytes(jaxpr: Any) -> float:
    """What a program computes, moves apart; infinite where one of its operations is never in one function."""
    return sum(map(_result_bytes, jaxpr.eqns))


def _result_bytes(eqn: Any) -> float:
    inner = list(inner_jaxprs(eqn))
    if inner and called(eqn) is not None:
        return sum(map(result_bytes, inner))
    if inner or stands_alone(eqn):
        return inf
    return 0.0 if is_free(eqn) or moves(eqn) else float(num_bytes(out.aval for out in eqn.outvars))
