"""The trace of an operator that is known by its products with vectors only."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree

from loopax._src.core.jaxpr.types import differing
from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.frontend.checks import Check, settle
from loopax._src.frontend.extent import known_int
from loopax._src.frontend.options import is_traced_int, prng_key
from loopax._src.frontend.raising import AMOUNT
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import Why, positive_float, positive_int, refuse_tracers
from loopax._src.stochtrace.estimator import Budget, Estimator, Stop, Tolerance, ends_in_errors
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
_LEVEL = Why("Student's quantiles", "compute an interval for each of the levels in question")


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
    most = _most_matvecs(estimator, operator, num_matvecs, max_matvecs)
    least, name = estimator.products_per_sample, type(estimator).__name__
    capacity = most // least
    limit = jnp.int32(capacity)  # of samples
    if num_matvecs is not None:
        is_traced_int("estimate_trace(num_matvecs=...)", num_matvecs)
        known, number = known_int(num_matvecs), jnp.asarray(num_matvecs)
        if known is not None and not least <= known <= most:
            raise ValueError(
                f"estimate_trace(num_matvecs={known}): {name} needs at least {least}, and max_matvecs is {most}."
            )
        if known is not None:
            limit = jnp.int32(known // least)
        else:
            wrong = (number < least) | (number > most)
            problem = (
                f"num_matvecs{AMOUNT} is less than {least}, which {name} needs, or more than max_matvecs, which is "
                f"{most}."
            )
            most_of_dtype = int(jnp.iinfo(number.dtype).max)
            limit = jnp.clip(number, least, min(most, most_of_dtype)).astype(jnp.int32) // least
            checks = [Check.of("loopax.stochtrace.estimate_trace", wrong, problem, number)]
    batch = positive_int("estimate_trace(batch=...)", batch, "products", _BATCH)
    minimum = -(-LEAST_FOR_TOLERANCE // least)
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


def _most_matvecs(estimator: Estimator, operator: Operator, num_matvecs: Any, max_matvecs: Any) -> int:
    """The static bound on the number of products; neither too few, nor more than make sense."""
    if max_matvecs is not None:
        number = positive_int("estimate_trace(max_matvecs=...)", max_matvecs, "products", _MAX_MATVECS)
    elif num_matvecs is None:
        raise ValueError(
            "estimate_trace(rtol=..., max_matvecs=None): a tolerance may need any number of products, and JAX needs a "
            "bound on it when it traces. Give max_matvecs= as an int; `converged` says whether it was enough."
        )
    else:
        is_traced_int("estimate_trace(num_matvecs=...)", num_matvecs)
        refuse_tracers("estimate_trace(num_matvecs=...)", num_matvecs, "a Python int", _MAX_MATVECS)
        number = int(num_matvecs)
    name, least = type(estimator).__name__, estimator.products_per_sample
    what = f"estimate_trace({'num_matvecs' if max_matvecs is None else 'max_matvecs'}={number}): {name}"
    if not least <= number <= MOST_STEPS:
        products = "product" if least == 1 else "products"
        raise ValueError(f"{what} needs at least {least} matrix-vector {products} (and counts to {MOST_STEPS}).")
    if estimator._has_basis and number // least > operator.size:
        raise ValueError(
            f"{what} makes a basis of {number // least} vectors from so many products, and the operator's vectors have "
            f"{operator.size} elements. Give at most {operator.size * least}; the {operator.size} products with unit "
            "vectors give the trace exactly."
        )
    return number


class TraceEstimate(NamedTuple):
    """An estimate of a trace, with its error.

    Attributes
    ----------
    value
        The estimate, in the dtype of the operator, but at least float32.
    std_error
        The standard error of `value` (for complex operators, of the complex value). Infinite if the samples do not
        determine it, as for a single sample. If a tolerance has ended the estimate, `std_error` is raised by at most
        half.
    num_matvecs : int32[]
        The number of matrix-vector products.
    converged : bool[]
        Whether the interval is as short as the tolerance asks. True if there is no tolerance.
    num_samples : int32[]
        The number of samples. `value` is their mean; a sample takes one, two or three products.
    skewness
        The skewness of the samples (of their real parts). Zero if there are at most two samples.

    """

    value: Inexact[Array, ""]
    std_error: Float[Array, ""]
    num_matvecs: Int[Array, ""]
    converged: Bool[Array, ""]
    num_samples: Int[Array, ""]
    skewness: Float[Array, ""]

    def interval(self, level: float = 0.95) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return a confidence interval: for the share `level` of random keys, the interval contains the trace.

        The meaning, with Student's quantile q for `num_samples - 1` degrees of freedom::

            low, high = value - q * std_error, value + q * std_error     # where skewness is zero

        With a positive skewness, the upper part of the interval is longer and the lower part is shorter. For estimates
        of several lanes, each lane has an interval. For a complex trace, the interval is one for its real part.

        Parameters
        ----------
        level
            The confidence level: a Python float between 0 and 1. The default is 0.95.

        Returns
        -------
        low, high
            The ends of the interval, real.

        Raises
        ------
        TypeError
            `level` is traced, or is not a number.
        ValueError
            `level` is not between 0 and 1.

        Notes
        -----
        The interval assumes at least six samples, or eleven with sign probes. docs/traces.md has the measured coverage,
        also for fewer samples.

        Sources: Student's quantiles; Hall's transformation (1992) for the skewness. See docs/references.md.

        """
        what = "TraceEstimate.interval(level=...)"
        refuse_tracers(what, level, "a Python float", _LEVEL)
        probability = positive_float(what, level)
        if probability >= 1:
            raise ValueError(f"{what}: got {level}, expected a probability between 0 and 1, such as 0.95.")
        below, above = ends_in_errors(probability, self.num_samples, self.skewness)
        is_known = jnp.isfinite(self.std_error)  # an infinite one has no derivative
        std_error = jnp.where(is_known, self.std_error, 1)
        low, high = self.value.real - below * std_error, self.value.real + above * std_error
        beyond = jnp.where(jnp.isnan(self.std_error), jnp.nan, jnp.inf)
        return jnp.where(is_known, low, -beyond), jnp.where(is_known, high, beyond)


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
    products = Products(square, budget.batch, differing(jax.tree.leaves((key, budget.stop))))
    found, converged = estimator._run(products, key, budget), jnp.ones((), bool)
    if (tolerance := budget.stop.tolerance) is not None:
        found, converged = tolerance.raised(found), tolerance.allows(found)
    matvecs = found.num_samples * estimator.products_per_sample
    value = found.value.astype(products.dtype)
    return settle(TraceEstimate(value, found.std_error, matvecs, converged, found.num_samples, found.skewness), checks)
