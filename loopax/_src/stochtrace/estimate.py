"""The trace of an operator that is known by its products with vectors only."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from loopax._src.core.jaxpr.types import differing
from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.frontend.extent import known_int
from loopax._src.frontend.options import is_traced_int, prng_key
from loopax._src.frontend.raising import AMOUNT
from loopax._src.frontend.run_time_checks import Check, settle
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import Why, positive_int, refuse_tracers
from loopax._src.stochtrace.estimator import Budget, Estimator, Tolerance, TraceEstimate
from loopax._src.stochtrace.hutchinson import Hutchinson
from loopax._src.stochtrace.operators import Operator, Products, to_operator

# A standard error from fewer products is too uncertain to stop at.
LEAST_FOR_TOLERANCE = 16
_MAX_MATVECS = Why(
    "the shapes of the largest arrays",
    "give a static bound, and let the number itself be traced: `num_matvecs=n, max_matvecs=64`",
)
_BATCH = Why(
    "how many products are evaluated together",
    "choose one for all calls: an estimate from so many products is the same",
)


def _budget(
    estimator: Estimator, operator: Operator, num_matvecs: Any, rtol: Any, atol: Any, max_matvecs: Any, batch: Any
) -> tuple[Budget, list[Check]]:
    """What an estimator may do, and what has to hold at run time."""
    tolerance, checks = _tolerance(operator, rtol, atol)
    if (num_matvecs is None) == (tolerance is None):
        raise ValueError(
            f"estimate_trace(num_matvecs=..., rtol=..., atol=...): got {'neither' if tolerance is None else 'both'} of "
            "a count and a tolerance. Give num_matvecs= for so many matrix-vector products, or rtol= or atol= to stop "
            "at a standard error of at most atol + rtol |value|."
        )
    if num_matvecs is not None:
        is_traced_int("estimate_trace(num_matvecs=...)", num_matvecs)
    # The static bound on the number of products: neither too few, nor more than make sense.
    if max_matvecs is not None:
        most = positive_int("estimate_trace(max_matvecs=...)", max_matvecs, "products", _MAX_MATVECS)
    elif num_matvecs is None:
        raise ValueError(
            "estimate_trace(rtol=..., max_matvecs=None): a tolerance may need any number of products, and JAX needs a "
            "bound on it when it traces. Give max_matvecs= as an int; `converged` says whether it was enough."
        )
    else:
        refuse_tracers("estimate_trace(num_matvecs=...)", num_matvecs, "a Python int", _MAX_MATVECS)
        most = int(num_matvecs)
    name, least = type(estimator).__name__, estimator.products_per_sample
    capacity = most // least  # of samples
    what = f"estimate_trace({'num_matvecs' if max_matvecs is None else 'max_matvecs'}={most}): {name}"
    if not least <= most <= MOST_STEPS:
        products = "product" if least == 1 else "products"
        raise ValueError(f"{what} needs at least {least} matrix-vector {products} (and counts to {MOST_STEPS}).")
    if estimator._has_basis and capacity > operator.size:
        raise ValueError(
            f"{what} makes a basis of {capacity} vectors from so many products, and the operator's vectors have "
            f"{operator.size} elements. Give at most {operator.size * least}; the {operator.size} products with unit "
            "vectors give the trace exactly."
        )
    # Before: a number of products. After: the number of samples at which it ends, perhaps known at run time alone.
    limit, known = capacity, known_int(num_matvecs)
    if known is not None:
        if not least <= known <= most:
            raise ValueError(
                f"estimate_trace(num_matvecs={known}): {name} needs at least {least}, and max_matvecs is {most}."
            )
        limit = known // least
    elif num_matvecs is not None:
        wrong = (num_matvecs < least) | (num_matvecs > most)
        problem = (
            f"num_matvecs{AMOUNT} is less than {least}, which {name} needs, or more than max_matvecs, which is {most}."
        )
        most_of_dtype = int(jnp.iinfo(num_matvecs.dtype).max)
        limit = jnp.clip(num_matvecs, least, min(most, most_of_dtype)).astype(jnp.int32) // least
        checks = [Check.of("loopax.stochtrace.estimate_trace", wrong, problem, num_matvecs)]
    batch = min(positive_int("estimate_trace(batch=...)", batch, "products", _BATCH), capacity)
    return Budget(jnp.int32(limit), tolerance, capacity, batch, minimum=-(-LEAST_FOR_TOLERANCE // least)), checks


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


@api_boundary
def estimate_trace(
    operator: Any,
    key: Array,
    *,
    estimator: Estimator = Hutchinson(),  # noqa: B008 (immutable)
    num_matvecs: int | Int[Array, ""] | None = None,
    rtol: float | Float[Array, ""] | None = None,
    atol: float | Float[Array, ""] | None = None,
    max_matvecs: int | None = None,
    batch: int = 1,
    size: int | PyTree[Any] | None = None,
) -> TraceEstimate:
    """Estimate the trace of an operator from its products with random vectors (probes).

    The meaning, for `Hutchinson`::

        samples = []
        while len(samples) < num_matvecs:  # or, with a tolerance, until the interval is short enough
            w = probe(fold_in(key, len(samples)))
            samples.append(vdot(w, A @ w))
        return mean(samples), std(samples, ddof=1) / sqrt(len(samples))

    Give either a number of products (`num_matvecs`) or a tolerance (`rtol`, `atol`).

    Parameters
    ----------
    operator
        The operator A, real or complex: a matrix `(n, n)`, a linear function v -> A v (with `size`), or a `lineax`
        operator. The vectors of a `lineax` operator may be pytrees.
    key
        A PRNG key. The same key and number of products give the same estimate for every `max_matvecs`. Lanes with the
        same key have the same probes.
    estimator
        The estimator: `Hutchinson()` (the default), `HutchPlusPlus()`, `XTrace()`, or `XNysTrace()` for semidefinite
        operators.
    num_matvecs
        The number of matrix-vector products, static or traced. A traced number needs `max_matvecs`, and may differ
        between lanes under `jax.vmap`. An estimator with two or three products per sample takes whole samples; the
        result has the number that was taken.
    rtol, atol
        The tolerance, instead of a number: stop when half of `interval(0.95)` is at most 1.96 (atol + rtol |value|).
        `atol + rtol |value|` bounds the standard error; the 95 % error is about twice as large. Static or traced. If
        only one of both is given, the other is zero. The first check is after 16 products, and the next each time that
        a tenth more products have been taken, always after whole batches.
    max_matvecs
        A static bound on the number of products. The bound decides the sizes of arrays. If the tolerance is not reached
        by then, the estimate ends there.
    batch
        The number of products that are evaluated together by `jax.vmap`. The default is 1. For most operators, a batch
        is faster, and takes `batch` times the memory. For estimators with several products per sample, `batch` counts
        samples.
    size
        The vectors of an operator that is a function: the number of elements (of the default float dtype, or complex if
        the result is complex), or a pytree of arrays or `jax.ShapeDtypeStruct`s.

    Returns
    -------
    TraceEstimate
        `(value, std_error, num_matvecs, converged, num_samples, skewness)`, with the method `interval(0.95)`.

    Raises
    ------
    TypeError
        - `operator` is not an operator, or its dtype is not floating or complex.
        - `operator` is a function, and there is no `size`.
        - `num_matvecs` is traced, and there is no `max_matvecs`.
        - An argument has a wrong type.
    ValueError
        - The operator is not square.
        - Both a number and a tolerance are given, or neither.
        - There is a tolerance without `max_matvecs`.
        - The number of products is too small for the estimator, or larger than a basis of vectors of this size can use.
        - `estimator` is `XNysTrace()`, and the operator is not declared semidefinite.
    equinox.EquinoxRuntimeError
        A traced `num_matvecs` is less than the estimator needs, or more than `max_matvecs`. A traced `rtol` or `atol`
        is negative or NaN.

    Notes
    -----
    Cost: `num_matvecs` products of the result, in batches (the last batch is evaluated whole), and the cost of the
    `estimator`.

    Derivatives: forward and reverse mode, in every order, with respect to all arrays in the operator. The derivative is
    that of the estimate with the same probes and the same number of products. A gradient evaluates the products again;
    `Hutchinson` stores nothing for it.

    Sources: Girard (1989), Hutchinson (1990), Meyer, Musco, Musco & Woodruff (2021), Epperly, Tropp & Webber (2024).
    See docs/references.md.

    """
    prng_key("estimate_trace", key)
    if not isinstance(estimator, Estimator):
        raise TypeError(
            f"estimate_trace(estimator=...): got {describe(estimator)}, expected Hutchinson(), HutchPlusPlus(), "
            "XTrace() or XNysTrace()."
        )
    square = to_operator(operator, size)
    estimator._check(square)
    budget, checks = _budget(estimator, square, num_matvecs, rtol, atol, max_matvecs, batch)
    products = Products(square, budget.batch, differing(jax.tree.leaves((key, budget))))
    found = estimator._run(products, key, budget)
    if (tolerance := budget.tolerance) is not None:
        found = tolerance.raised(found)._replace(converged=tolerance.allows(found))
    matvecs = found.num_samples * estimator.products_per_sample
    return settle(found._replace(value=found.value.astype(products.dtype), num_matvecs=matvecs), checks)
