"""How many products an estimate may take, from what the user has said."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.frontend.limits import known_int
from loopax._src.frontend.options import is_traced_int
from loopax._src.frontend.raising import AMOUNT
from loopax._src.frontend.runtime_checks import Check
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static_args import Why, positive_int, refuse_tracers
from loopax._src.stochtrace.estimator import Budget, Estimator, Stop, Tolerance
from loopax._src.stochtrace.operators import Operator

# A standard error from fewer products is too uncertain to stop at.
LEAST_FOR_TOLERANCE = 16
_GIVE_BOUND = "give a static bound, and let the number itself be traced: `num_matvecs=n, max_matvecs=64`"
_MAX_MATVECS = Why("the shapes of the largest arrays", _GIVE_BOUND)
_BATCH = Why(
    "how many products are evaluated together",
    "choose one for all calls: an estimate from so many products is the same",
)


def to_budget(
    estimator: Estimator, operator: Operator, num_matvecs: Any, rtol: Any, atol: Any, max_matvecs: Any, batch: Any
) -> tuple[Budget, list[Check]]:
    """What an estimator may do, and what has to hold at run time."""
    per_sample = estimator.products_per_sample
    tolerance, checks = _tolerance(operator, rtol, atol)
    if (num_matvecs is None) == (tolerance is None):
        raise ValueError(_COUNT_OR_TOLERANCE.format("neither" if tolerance is None else "both"))
    most = _most_matvecs(num_matvecs, max_matvecs)
    _check_matvecs(estimator, operator, most, "num_matvecs" if max_matvecs is None else "max_matvecs")
    capacity = most // per_sample
    limit = jnp.int32(capacity)
    if num_matvecs is not None:
        limit, checks = _limit(estimator, num_matvecs, most)
    batch = positive_int("estimate_trace(batch=...)", batch, "products", _BATCH)
    minimum = -(-LEAST_FOR_TOLERANCE // per_sample)
    return Budget(capacity, min(batch, capacity), minimum, Stop(limit, tolerance)), checks


def _tolerance(operator: Operator, rtol: Any, atol: Any) -> tuple[Tolerance | None, list[Check]]:
    """The tolerance, and what has to hold of traced numbers: an estimate with one that is wrong ends at once."""
    if rtol is None and atol is None:
        return None, []
    real = jnp.finfo(operator.working_dtype).dtype
    values, checks = [], []
    for name, value in (("rtol", rtol), ("atol", atol)):
        value = 0.0 if value is None else value
        if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array) or jnp.shape(value) != ():
            raise TypeError(f"estimate_trace({name}=...): got {describe(value)}, expected one number.")
        if not isinstance(value, Tracer) and not float(value) >= 0:
            raise ValueError(f"estimate_trace({name}=...): got {value}, expected a number that is not negative.")
        number = jnp.asarray(value).astype(real)
        if isinstance(value, Tracer):
            wrong = ~(number >= 0)
            checks.append(Check.of("loopax.stochtrace.estimate_trace", wrong, f"{name} is negative, or NaN."))
            number = jnp.where(wrong, jnp.inf, number)
        values.append(number)
    return Tolerance(*values), checks


def _most_matvecs(num_matvecs: Any, max_matvecs: Any) -> int:
    """The static bound on the number of products."""
    if max_matvecs is not None:
        return positive_int("estimate_trace(max_matvecs=...)", max_matvecs, "products", _MAX_MATVECS)
    if num_matvecs is None:
        raise ValueError(
            "estimate_trace(rtol=..., max_matvecs=None): a tolerance may need any number of products, and JAX needs a "
            "bound on it when it traces. Give max_matvecs= as an int; `converged` says whether it was enough."
        )
    is_traced_int("estimate_trace(num_matvecs=...)", num_matvecs)
    expected = "a Python int"
    refuse_tracers("estimate_trace(num_matvecs=...)", num_matvecs, expected, _MAX_MATVECS)
    return int(num_matvecs)


def _check_matvecs(estimator: Estimator, operator: Operator, number: int, argument: str) -> None:
    """Refuse too few, and more than make sense."""
    name, least = type(estimator).__name__, estimator.products_per_sample
    if not least <= number <= MOST_STEPS:
        raise ValueError(
            f"estimate_trace({argument}={number}): {name} needs at least {least} matrix-vector product"
            f"{'s' if least > 1 else ''} (and counts to {MOST_STEPS})."
        )
    most = estimator.most_samples(operator.size)
    if most is not None and number // least > most:
        raise ValueError(
            f"estimate_trace({argument}={number}): {name} makes a basis of {number // least} vectors from so many "
            f"products, and the operator's vectors have {operator.size} elements. Give at most {most * least}; the "
            f"{operator.size} products with unit vectors give the trace exactly."
        )


def _limit(estimator: Estimator, num_matvecs: Any, most: int) -> tuple[Any, list[Check]]:
    """The number of samples, where it is asked for."""
    is_traced_int("estimate_trace(num_matvecs=...)", num_matvecs)
    least, known = estimator.products_per_sample, known_int(num_matvecs)
    if known is not None and not least <= known <= most:
        raise ValueError(
            f"estimate_trace(num_matvecs={known}): {type(estimator).__name__} needs at least {least}, and "
            f"max_matvecs is {most}."
        )
    if known is not None:
        return jnp.int32(known // least), []
    number = jnp.asarray(num_matvecs)
    wrong = (number < least) | (number > most)
    problem = (
        f"num_matvecs{AMOUNT} is less than {least}, which {type(estimator).__name__} needs, or more than max_matvecs, "
        f"which is {most}."
    )
    limit = jnp.clip(number, least, min(most, int(jnp.iinfo(number.dtype).max))).astype(jnp.int32) // least
    return limit, [Check.of("loopax.stochtrace.estimate_trace", wrong, problem, number)]


_COUNT_OR_TOLERANCE = (
    "estimate_trace(num_matvecs=..., rtol=..., atol=...): got {} of a count and a tolerance. Give num_matvecs= for so "
    "many matrix-vector products, or rtol= or atol= to stop at a standard error of at most atol + rtol |value|."
)
