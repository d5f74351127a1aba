"""The fewest products and the most, the smallest operators, and operators of a low rank."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.stochtrace.factorizations import inverse_by_elimination, inverse_of_lower
from loopax.stochtrace import HutchPlusPlus, XNysTrace, XTrace, estimate_trace
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
each_batch = pytest.mark.parametrize("batch", [5, 12])  # uneven ones, a single one


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
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex128], ids=["f32", "c128"])
def test_an_operator_of_one_element(estimator: Any, dtype: Any) -> None:
    got = compiled(estimator, num_matvecs=estimator.products_per_sample)(np.full((1, 1), 3, dtype))
    assert got.value.dtype == dtype
    np.testing.assert_allclose(got.value, 3.0, rtol=1e-6)


@with_basis
@each_batch
def test_low_ranks(estimator: Any, batch: int) -> None:
    """Exact and finite where there are more samples than eigenvalues; every probe sees all of a multiple of I."""
    eigenvalues: list[float]
    for eigenvalues in ([], [3.0, 2.0, 1e-9], [1.0] * 12, [1e-100] * 4, [1e100, 1.0]):
        got = samples_in_batches(estimator, 8, batch, with_eigenvalues(eigenvalues))
        scale = sum(eigenvalues) or 1.0
        if isinstance(estimator, HutchPlusPlus) and len(eigenvalues) == N:
            assert got.std_error > 0  # signs do not see that it is a multiple of I
            assert abs(float(got.value) - scale) < 4 * got.std_error
        else:
            assert_close(np.asarray(got.value) / scale, np.asarray(sum(eigenvalues) / scale), 1e-8)
            assert np.asarray(got.std_error) / scale < 1e-8
    matrix = PSD if isinstance(estimator, XNysTrace) else GENERAL
    assert_close(samples_in_batches(estimator, N, batch, matrix).value, np.trace(matrix), 1e-8)


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


@with_basis
@each_batch
def test_products_without_rounding_errors(estimator: Any, batch: int) -> None:
    """Images that depend on each other exactly leave no direction to rounding errors."""
    for name, samples in product(EXACT, (4, 8, N)):
        got = samples_in_batches(estimator, samples, batch, EXACT[name].astype(np.float32))
        trace = np.trace(EXACT[name])
        if isinstance(estimator, HutchPlusPlus) and (name == "identity" or samples < 6):
            continue  # signs do not see that it is one, and few of them miss a block
        assert_close(float(got.value), float(trace), 2e-4 * max(trace, 1))
        low, high = map(float, got.interval())
        assert low <= trace <= high


@with_basis
def test_products_are_of_full_precision(estimator: Any) -> None:
    """A GPU rounds the operands of other products to eleven bits."""
    value = lambda m: estimate_trace(m, jax.random.key(0), num_matvecs=12, estimator=estimator).std_error
    program = jax.jit(jax.grad(value)).lower(jax.ShapeDtypeStruct((N, N), np.float32)).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line] == []


# ---- inverses without LAPACK's triangular solve, which divides its work among the threads of OpenBLAS


inverse = jax.jit(inverse_by_elimination)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_inverse(dtype):
    for rows in (1, 2, 3, 13):
        random = np.random.RandomState(rows)
        matrix = random.randn(rows, rows).astype(dtype)
        if np.iscomplexobj(matrix):
            matrix += 1j * random.randn(rows, rows)
        wanted = np.linalg.inv(np.asarray(matrix, np.promote_types(dtype, np.float64)))
        found = inverse(matrix)
        assert found.dtype == dtype
        size = np.abs(wanted).max() * np.linalg.cond(wanted)
        np.testing.assert_allclose(found, wanted, atol=20 * float(jnp.finfo(dtype).eps) * size)


def test_rows_are_exchanged_and_a_singular_matrix_has_no_finite_inverse():
    matrix = np.array([[0.0, 2.0, 0.0], [0.0, 0.0, 4.0], [1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(inverse(matrix), np.array([[0, 0, 1.0], [0.5, 0, 0], [0, 0.25, 0]]))
    for singular in (np.zeros((3, 3)), np.ones((2, 2))):
        assert not np.isfinite(inverse(singular)).all()


def test_lower_triangle_stays_one():
    matrix = np.tril(np.arange(1.0, 37.0).reshape(6, 6))
    found = np.asarray(jax.jit(inverse_of_lower)(matrix))
    np.testing.assert_array_equal(found, np.tril(found))
    np.testing.assert_allclose(found @ matrix, np.eye(6), atol=1e-12)


def test_estimates_and_their_gradients_call_no_triangular_solve():
    for estimator in (XNysTrace(positive_semidefinite=True), XTrace()):
        value = lambda m, e=estimator: estimate_trace(m, jax.random.key(0), num_matvecs=32, estimator=e).value
        program = jax.jit(jax.value_and_grad(value)).lower(jax.ShapeDtypeStruct((40, 40), float)).as_text()
        assert "lapack_dgetrf" in program
        assert "trsm" not in program
