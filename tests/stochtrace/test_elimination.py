"""Inverses of small matrices without LAPACK's triangular solve, which divides its work among OpenBLAS's threads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.stochtrace.elimination import inverse_by_elimination, inverse_of_lower
from loopax.stochtrace import XNysTrace, XTrace, estimate_trace


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.complex128])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13])
def test_inverse(dtype, rows):
    matrix = jax.random.normal(jax.random.key(rows), (rows, rows), dtype)
    wanted = np.linalg.inv(np.asarray(matrix, np.promote_types(dtype, np.float64)))
    found = inverse_by_elimination(matrix)
    assert found.dtype == dtype
    size = np.abs(wanted).max() * np.linalg.cond(wanted)
    np.testing.assert_allclose(found, wanted, atol=20 * float(jnp.finfo(dtype).eps) * size)


def test_rows_are_exchanged():
    matrix = jnp.array([[0.0, 2.0, 0.0], [0.0, 0.0, 4.0], [1.0, 0.0, 0.0]])
    assert jnp.array_equal(inverse_by_elimination(matrix), jnp.array([[0, 0, 1.0], [0.5, 0, 0], [0, 0.25, 0]]))


def test_lower_triangle_stays_one():
    matrix = jnp.tril(jnp.arange(1.0, 37.0).reshape(6, 6))
    found = inverse_of_lower(matrix)
    assert jnp.array_equal(found, jnp.tril(found))
    np.testing.assert_allclose(found @ matrix, jnp.eye(6), atol=1e-12)


@pytest.mark.parametrize("matrix", [jnp.zeros((3, 3)), jnp.ones((2, 2))])
def test_singular_matrix_has_no_finite_inverse(matrix):
    assert not jnp.isfinite(inverse_by_elimination(matrix)).all()


@pytest.mark.parametrize("estimator", [XNysTrace(positive_semidefinite=True), XTrace()], ids=["XNysTrace", "XTrace"])
def test_estimates_and_their_gradients_call_no_triangular_solve(estimator):
    def estimate(matrix):
        return estimate_trace(matrix, jax.random.key(0), num_matvecs=32, estimator=estimator).value

    program = jax.jit(jax.value_and_grad(estimate)).lower(jnp.eye(40)).as_text()
    assert "lapack_dgetrf" in program
    assert "trsm" not in program
