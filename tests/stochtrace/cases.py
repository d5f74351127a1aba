"""Estimators and operators for the tests of traces."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from loopax import stochtrace
from loopax._src.stochtrace.estimator import Estimator

N = 12
KEY = jax.random.key(0)
GENERAL = jnp.asarray(np.random.RandomState(0).randn(N, N))
ORTHOGONAL = jnp.linalg.qr(GENERAL)[0]
PSD = GENERAL @ GENERAL.T / N
TURNED = jnp.asarray(np.random.RandomState(1).randn(N, N)) / 6
NUM_MATVECS = 6

ESTIMATORS = [
    stochtrace.Hutchinson(),
    stochtrace.HutchPlusPlus(),
    stochtrace.XTrace(),
    stochtrace.XNysTrace(positive_semidefinite=True),
]
WITH_BASIS = ESTIMATORS[1:]
TWO_ESTIMATORS = [ESTIMATORS[0], ESTIMATORS[-1]]  # a stream and a basis, for what they share and what takes long


def name_of(value: Any) -> str:
    """A short name for pytest's parameters."""
    return type(value).__name__ if isinstance(value, Estimator) else str(value)


def with_eigenvalues(values: Any) -> Array:
    """A symmetric matrix with these eigenvalues, the others zero."""
    values = jnp.asarray(values, float)
    vectors = ORTHOGONAL[:, : len(values)]
    return (vectors * values[None]) @ vectors.T


def estimate(estimator: Estimator, **options: Any) -> Callable[..., stochtrace.TraceEstimate]:
    """The estimate from a matrix."""
    options = {"key": KEY, "num_matvecs": NUM_MATVECS} | options
    if "rtol" in options or "atol" in options:
        del options["num_matvecs"]
    return partial(stochtrace.estimate_trace, estimator=estimator, **options)


def value_along(estimator: Estimator, matrix: Array = PSD, **options: Any) -> Callable[[Any], Array]:
    """The estimate as a function of one number, along a curve of matrices that stay semidefinite and of one rank."""

    def value(t: Any) -> Array:
        turned = jnp.eye(N) + jnp.sin(t) * TURNED
        return estimate(estimator, **options)(turned @ matrix @ turned.T).value

    return value
