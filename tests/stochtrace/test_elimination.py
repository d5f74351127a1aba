"""Inverses of small matrices without LAPACK's triangular solve, which divides its work among OpenBLAS's threads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.stochtrace.factorizations import inverse_by_elimination, inverse_of_lower
from loopax.stochtrace import XNysTrace, XTrace, estimate_trace

inverse = jax.jit(inverse_by_elimination)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13])
def test_inverse(dtype, rows):
    random = np.random.RandomState(rows)
    matrix = random.randn(rows, rows).astype(dtype)
    if np.iscomplexobj(matrix):
        matrix += 1j * random.randn(rows, rows)
    wanted = np.linalg.inv(np.asarray(matrix, np.promote_types(dtype, np.float64)))
    found = inverse(matrix)
    assert found.dtype == dtype
    size = np.abs(wanted).max() * np.linalg.cond(wanted)
    np.testing.assert_allclose(found, wanted, atol=20 * float(jnp.finfo(dtype).eps) * size)


def test_rows_are_exchanged():
    matrix = np.array([[0.0, 2.0, 0.0], [0.0, 0.0, 4.0], [1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(inverse(matrix), np.array([[0, 0, 1.0], [0.5, 0, 0], [0, 0.25, 0]]))


def test_lower_triangle_stays_one():
    matrix = np.tril(np.arange(1.0, 37.0).reshape(6, 6))
    found = np.asarray(jax.jit(inverse_of_lower)(matrix))
    np.testing.assert_array_equal(found, np.tril(found))
    np.testing.assert_allclose(found @ matrix, np.eye(6), atol=1e-12)


@pytest.mark.parametrize("matrix", [np.zeros((3, 3)), np.ones((2, 2))], ids=["zero", "ones"])
def test_singular_matrix_has_no_finite_inverse(matrix):
    assert not np.isfinite(inverse(matrix)).all()


@pytest.mark.parametrize("estimator", [XNysTrace(positive_semidefinite=True), XTrace()], ids=["XNysTrace", "XTrace"])
def test_estimates_and_their_gradients_call_no_triangular_solve(estimator):
    def estimate(matrix):
        return estimate_trace(matrix, jax.random.key(0), num_matvecs=32, estimator=estimator).value

    program = jax.jit(jax.value_and_grad(estimate)).lower(jax.ShapeDtypeStruct((40, 40), float)).as_text()
    assert "lapack_dgetrf" in program
    assert "trsm" not in program
