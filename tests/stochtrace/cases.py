"""Estimators and operators for the tests of traces."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from loopax import stochtrace
from loopax._src.stochtrace.estimator import Estimator
from loopax._src.stochtrace.operators import draw

N = 12
KEY = jax.random.key(0)
_GENERAL = np.random.RandomState(0).randn(N, N)
ORTHOGONAL = np.linalg.qr(_GENERAL)[0]
GENERAL = jnp.asarray(_GENERAL)
PSD = jnp.asarray(_GENERAL @ _GENERAL.T / N)
TURNED = jnp.asarray(np.random.RandomState(1).randn(N, N) / 6)
NUM_MATVECS = 6

ESTIMATORS = [
    stochtrace.Hutchinson(),
    stochtrace.HutchPlusPlus(),
    stochtrace.XTrace(),
    stochtrace.XNysTrace(positive_semidefinite=True),
]
WITH_BASIS = ESTIMATORS[1:]


def name_of(value: Any) -> str:
    """A short name for pytest's parameters."""
    return type(value).__name__ if isinstance(value, Estimator) else str(value)


each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=name_of)


def fast_and_slow(fast: list[Estimator], slow: list[Estimator]) -> Any:
    """Those whose programs are soon compiled, and those that say no more about what estimators share."""
    parameters = [*fast, *(pytest.param(estimator, marks=pytest.mark.slow) for estimator in slow)]
    return pytest.mark.parametrize("estimator", parameters, ids=name_of)


each_estimator_two_fast = fast_and_slow(ESTIMATORS[:2], ESTIMATORS[2:])


def with_eigenvalues(values: Any) -> Array:
    """A symmetric matrix with these eigenvalues, the others zero."""
    values = np.asarray(values, float)
    vectors = ORTHOGONAL[:, : len(values)]
    return jnp.asarray((vectors * values) @ vectors.T)


def estimate(estimator: Estimator, **options: Any) -> Callable[..., stochtrace.TraceEstimate]:
    """The estimate from a matrix."""
    options = {"key": KEY, "num_matvecs": NUM_MATVECS} | options
    if "rtol" in options or "atol" in options:
        del options["num_matvecs"]
    return partial(stochtrace.estimate_trace, estimator=estimator, **options)


@cache
def compiled(estimator: Estimator, **static: Any) -> Callable[..., stochtrace.TraceEstimate]:
    """The estimate as a compiled function of a matrix and of traced options: one program for all tests of a file."""
    return jax.jit(lambda matrix, **traced: estimate(estimator, **static, **traced)(matrix))


@cache
def _drawn(name: Any, size: int, count: int) -> np.ndarray:
    return np.asarray(
        jax.jit(lambda numbers: draw(name, KEY, numbers, size, jnp.float64))(np.arange(count, dtype="i4"))
    )


def probes_of(name: Any, count: int, size: int = N) -> np.ndarray:
    """What an estimate with `KEY` draws, a column for each."""
    return _drawn(name, size, max(count, 12))[:count].T


def value_along(estimator: Estimator, matrix: Array = PSD, **options: Any) -> Callable[[Any], Array]:
    """The estimate as a function of one number, along a curve of matrices that stay semidefinite and of one rank."""

    def value(t: Any) -> Array:
        turned = jnp.eye(N) + jnp.sin(t) * TURNED
        return estimate(estimator, **options)(turned @ matrix @ turned.T).value

    return value
