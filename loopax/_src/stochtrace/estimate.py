"""The trace of an operator that is known by its products with vectors only."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree

from loopax._src.frontend.options import prng_key
from loopax._src.frontend.runtime_checks import settle
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static_args import Why, positive_float, refuse_tracers
from loopax._src.stochtrace.arguments import to_budget
from loopax._src.stochtrace.estimator import Estimator
from loopax._src.stochtrace.hutchinson import Hutchinson
from loopax._src.stochtrace.intervals import ends_in_errors
from loopax._src.stochtrace.operators import to_operator
from loopax._src.stochtrace.products import Products


class TraceEstimate(NamedTuple):
    """An estimate of a trace.

    Attributes
    ----------
    value
        The estimate, of the operator's dtype, float32 at least.
    std_error
        Its standard error, of the complex value where it is complex. Infinite where the samples say nothing about it,
        as a single one does. Raised, by half at most, where a tolerance has ended the estimate.
    num_matvecs : int32[]
        Matrix-vector products that it is from.
    converged : bool[]
        Whether the interval is as short as the tolerance asks; True where none was asked for.
    num_samples : int32[]
        Samples that it is the mean of; a sample takes one product, two or three.
    skewness
        The skewness of the samples (of their real parts), zero where two or fewer say nothing about it.

    """

    value: Inexact[Array, ""]
    std_error: Float[Array, ""]
    num_matvecs: Int[Array, ""]
    converged: Bool[Array, ""]
    num_samples: Int[Array, ""]
    skewness: Float[Array, ""]

    def interval(self, level: float = 0.95) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """A confidence interval: for this share of keys it has the trace in it.

        The meaning, with Student's quantile q for `num_samples - 1` degrees of freedom::

            low, high = value - q * std_error, value + q * std_error     # where skewness is zero

        With a positive skewness the upper part is longer and the lower part shorter. Estimates of several lanes give an
        interval for each. For a complex trace this is an interval for its real part.

        Parameters
        ----------
        level
            The share, a Python float between 0 and 1.

        Returns
        -------
        low, high
            The ends, real.

        Raises
        ------
        TypeError
            `level` is traced, or no number.
        ValueError
            `level` is not between 0 and 1.

        Notes
        -----
        Assumes six samples or more, eleven from signs; docs/traces.md has what fewer do, and what was measured. Source:
        Student's quantiles, Hall's transformation (1992) for the skewness, see docs/references.md.

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


_LEVEL = Why("Student's quantiles", "compute an interval for each of the levels in question")


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
    """Estimate the trace of an operator from its products with random vectors.

    The meaning, for `Hutchinson`::

        samples = []
        while len(samples) < num_matvecs:  # or, with a tolerance, until the interval is short enough
            w = probe(fold_in(key, len(samples)))
            samples.append(vdot(w, A @ w))
        return mean(samples), std(samples, ddof=1) / sqrt(len(samples))

    Parameters
    ----------
    operator
        A matrix `(n, n)`; a function that is A v for a v, linear, with `size`; or a `lineax` operator, whose vectors
        may be pytrees. Real or complex.
    key
        A PRNG key. The same key and number of products give the same estimate, whatever `max_matvecs`; lanes that
        share a key share probes.
    estimator
        `Hutchinson()`, `HutchPlusPlus()`, `XTrace()`, or `XNysTrace()` for semidefinite operators.
    num_matvecs
        How many matrix-vector products to take, static or traced (then with `max_matvecs`); it may differ between
        lanes under `jax.vmap`. An estimator that takes two or three products for a sample takes whole samples:
        the result has the number.
    rtol, atol
        In place of a number: stop as soon as half of `interval(0.95)` is at most 1.96 (atol + rtol |value|). So they
        bound a standard error; the 95 % error is about twice as large. This is checked after 16 products, and after
        each tenth more, in whole batches. Static or traced. One that is not given is zero.
    max_matvecs
        A static bound on the number of products, which decides how large arrays are; a tolerance that is not reached
        by then ends there.
    batch
        Products that are evaluated together, as one by `jax.vmap`, where there are so many (of as many samples, for
        estimators that take several products for one): faster for most operators, for as many times the memory.
    size
        For a function: the number of elements of v, which is then a vector of the default float dtype (or complex,
        where the result is); or a pytree of arrays or `jax.ShapeDtypeStruct`s like v.

    Returns
    -------
    TraceEstimate
        `(value, std_error, num_matvecs, converged, num_samples, skewness)`, with `interval(0.95)`.

    Raises
    ------
    TypeError
        `operator` is none, or not floating or complex; a function without `size`; a traced `num_matvecs` without
        `max_matvecs`; an argument of a wrong type.
    ValueError
        The operator is not square; neither a count nor a tolerance, or both; a tolerance without `max_matvecs`; too
        few products for the estimator, or more than a basis of vectors of this size can have; `XNysTrace` for an
        operator that is not declared semidefinite.
    equinox.EquinoxRuntimeError
        A traced `num_matvecs` is less than the estimator needs, or more than `max_matvecs`.

    Notes
    -----
    Cost: as many products as `num_matvecs` in the result says, in batches (the last one is evaluated whole), and
    what the `estimator` adds. Derivatives: all, in every order, with respect to what the operator is made of, as
    those of an estimate from the same probes and as many of them; each evaluates the products again, and
    `Hutchinson` stores nothing for them. Sources: Girard (1989), Hutchinson (1990), Meyer, Musco, Musco & Woodruff
    (2021), Epperly, Tropp & Webber (2024), see docs/references.md.

    """
    prng_key("estimate_trace", key)
    if not isinstance(estimator, Estimator):
        raise TypeError(
            f"estimate_trace(estimator=...): got {describe(estimator)}, expected Hutchinson(), HutchPlusPlus(), "
            "XTrace() or XNysTrace()."
        )
    square = to_operator(operator, size)
    estimator.check(square)
    budget, checks = to_budget(estimator, square, num_matvecs, rtol, atol, max_matvecs, batch)
    products = Products(square, budget.batch)
    found, converged = estimator.run(products, key, budget), jnp.ones((), bool)
    if (tolerance := budget.stop.tolerance) is not None:
        found, converged = tolerance.raised(found), tolerance.allows(found)
    matvecs = found.num_samples * estimator.products_per_sample
    value = found.value.astype(products.dtype)
    return settle(TraceEstimate(value, found.std_error, matvecs, converged, found.num_samples, found.skewness), checks)
