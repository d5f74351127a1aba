"""The fewest products and the most, the smallest operators, and operators of a low rank."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax.stochtrace import HutchPlusPlus, XNysTrace, XTrace
from tests.stochtrace.cases import (
    GENERAL,
    KEY,
    PSD,
    WITH_BASIS,
    N,
    compiled,
    each_estimator,
    estimate,
    name_of,
    with_eigenvalues,
)
from tests.support.reference import assert_close

with_basis = pytest.mark.parametrize("estimator", WITH_BASIS, ids=name_of)
each_batch = pytest.mark.parametrize("batch", [1, 5, 12])  # several, uneven ones, a single one


def samples_in_batches(estimator: Any, samples: int, batch: int, matrix: Any) -> Any:
    """Of an estimate that has room for as many samples as there are elements: one program for all tests here."""
    per_sample = estimator.products_per_sample
    return compiled(estimator, max_matvecs=N * per_sample, batch=batch)(matrix, num_matvecs=samples * per_sample)


@each_estimator
def test_the_least_number_of_products(estimator: Any) -> None:
    """A single sample is an estimate, and says nothing about its error."""
    got = compiled(estimator, num_matvecs=estimator.products_per_sample)(PSD)
    assert np.isfinite(got.value)
    assert np.isinf(got.std_error)
    assert got.num_matvecs == estimator.products_per_sample


@each_estimator
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.complex128], ids=["f32", "f64", "c128"])
def test_an_operator_of_one_element(estimator: Any, dtype: Any) -> None:
    got = compiled(estimator, num_matvecs=estimator.products_per_sample)(np.full((1, 1), 3, dtype))
    assert got.value.dtype == dtype
    np.testing.assert_allclose(got.value, 3.0, rtol=1e-6)


@pytest.mark.parametrize("eigenvalues", [[], [1.0], [3.0, 2.0, 1e-9], [1.0] * 12, [1e-100] * 4, [1e100, 1.0]], ids=str)
@with_basis
@each_batch
def test_low_ranks(estimator: Any, eigenvalues: list[float], batch: int) -> None:
    """Exact and finite where there are more samples than eigenvalues; every probe sees all of a multiple of I."""
    got = samples_in_batches(estimator, 8, batch, with_eigenvalues(eigenvalues))
    scale = sum(eigenvalues) or 1.0
    if isinstance(estimator, HutchPlusPlus) and len(eigenvalues) == N:  # signs do not see that it is a multiple of I
        assert got.std_error > 0
        assert abs(float(got.value) - scale) < 4 * got.std_error
        return
    assert_close(np.asarray(got.value) / scale, np.asarray(sum(eigenvalues) / scale), 1e-8)
    assert np.asarray(got.std_error) / scale < 1e-8


@with_basis
@each_batch
def test_a_basis_of_the_whole_space_gives_the_trace(estimator: Any, batch: int) -> None:
    matrix = PSD if isinstance(estimator, XNysTrace) else GENERAL
    got = samples_in_batches(estimator, N, batch, matrix)
    assert_close(got.value, np.trace(matrix), 1e-8)


@pytest.mark.parametrize(
    "estimator", [XTrace("rademacher"), XNysTrace("rademacher", positive_semidefinite=True)], ids=name_of
)
def test_probes_that_are_each_other_s_negative(estimator: Any) -> None:
    """Signs of few elements repeat themselves, and a basis of their images has fewer directions than probes."""
    matrix = jnp.asarray([[2.0, 1.0], [1.0, 3.0]])
    matvecs = 2 * estimator.products_per_sample
    run = jax.jit(jax.vmap(lambda key: estimate(estimator, key=key, num_matvecs=matvecs)(matrix)))
    got = run(jax.random.split(KEY, 50))
    assert np.isfinite(got.value).all()
    assert np.isfinite(got.std_error).all()


@with_basis
def test_a_basis_stays_orthonormal_beyond_the_rank(estimator: Any) -> None:
    """Directions that rounding errors decide are as orthogonal as others; float32 has more of them."""
    matrix = np.asarray(with_eigenvalues([1.0, 0.5]), np.float32)
    got = compiled(estimator, num_matvecs=10 * estimator.products_per_sample)(matrix)
    assert_close(np.asarray(got.value, float), np.asarray(1.5), 1e-5)


EXACT = {
    "ones": np.ones((N, N)),
    "two blocks of ones": np.kron(np.eye(2), np.ones((N // 2, N // 2))),
    "identity": np.eye(N),
    "a diagonal of three": np.diag(np.r_[4.0, 2.0, 1.0, np.zeros(N - 3)]),
    "zero": np.zeros((N, N)),
}


@pytest.mark.parametrize("name", EXACT)
@with_basis
@each_batch
def test_products_without_rounding_errors(estimator: Any, name: str, batch: int) -> None:
    """Images that depend on each other exactly leave no direction to rounding errors."""
    for samples in (4, 8, N):
        got = samples_in_batches(estimator, samples, batch, EXACT[name].astype(np.float32))
        trace = np.trace(EXACT[name])
        if isinstance(estimator, HutchPlusPlus) and (name == "identity" or samples < 6):
            continue  # signs do not see that it is one, and few of them miss a block
        assert_close(float(got.value), float(trace), 2e-4 * max(trace, 1))
        low, high = map(float, got.interval())
        assert low <= trace <= high
