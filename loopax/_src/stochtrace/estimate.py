"""The trace of an operator that is known by its products with vectors only."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree

from loopax._src.frontend.options import prng_key
from loopax._src.frontend.runtime_checks import settle
from loopax._src.pytrees.leaves import describe
from loopax._src.stochtrace.budget import to_budget
from loopax._src.stochtrace.estimator import Estimator
from loopax._src.stochtrace.hutchinson import Hutchinson
from loopax._src.stochtrace.operators import to_operator
from loopax._src.stochtrace.products import Products


class TraceEstimate(NamedTuple):
    """An estimate of a trace.

    Attributes
    ----------
    value
        The estimate, of the operator's dtype, float32 at least.
    std_error
        Its standard error; infinite from a single sample, which says nothing about it. The interval
        value ± 1.96 std_error covers the trace in about 95 of 100 cases, in 90 to 95 with a tolerance, and
        docs/traces.md says when in fewer.
    num_matvecs : int32[]
        Matrix-vector products that it is from.
    converged : bool[]
        Whether the standard error is within the tolerance; True where none was asked for.

    """

    value: Inexact[Array, ""]
    std_error: Float[Array, ""]
    num_matvecs: Int[Array, ""]
    converged: Bool[Array, ""]


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
        while len(samples) < num_matvecs:        # or, with a tolerance, until
            w = probe(fold_in(key, len(samples)))  # std_error <= atol + rtol * abs(mean(samples))
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
        In place of a number: stop as soon as the standard error is at most atol + rtol |value|, after 16 products at
        least. Static or traced. One that is not given is zero.
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
        `(value, std_error, num_matvecs, converged)`.

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
    value, std_error, count = estimator.run(products, key, budget)
    converged = jnp.ones((), bool) if budget.tolerance is None else budget.tolerance.allows(value, std_error)
    matvecs = count * estimator.products_per_sample
    return settle(TraceEstimate(value.astype(products.dtype), std_error, matvecs, converged), checks)
