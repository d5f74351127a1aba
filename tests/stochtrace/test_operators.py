"""What a trace can be taken of."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import loopax as lx
from loopax.stochtrace import Hutchinson, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import ESTIMATORS, GENERAL, KEY, PSD, N, compiled, each_estimator_two_fast, fast_and_slow
from tests.support.limited_loops import raises
from tests.support.reference import assert_close

lineax = pytest.importorskip("lineax")
PARAMETERS = {"w": np.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": np.array([0.1, -0.4])}


def loss(p: Any) -> Any:
    """Convex, with a Hessian that is not diagonal."""
    return (jnp.cosh(p["w"] @ (np.arange(1.0, 4.0) / 4) + p["b"]) ** 2).sum()


def hessian_of_loss() -> Any:
    flat, unravel = ravel_pytree(PARAMETERS)
    return jax.hessian(lambda x: loss(unravel(x)))(flat)


def assert_each_close(actual: dict[str, Any]) -> None:
    """All of them are as the one named "expected"."""
    expected = actual.pop("expected")
    for name, estimate in actual.items():
        assert name
        assert_close(estimate, expected)


@fast_and_slow(ESTIMATORS[:1], ESTIMATORS[3:])
def test_a_function_a_matrix_and_an_operator_are_the_same(estimator: Any) -> None:
    options = {"estimator": estimator, "num_matvecs": 6}
    vector, tag = jax.ShapeDtypeStruct((N,), float), lineax.positive_semidefinite_tag

    @jax.jit
    def run() -> dict[str, Any]:
        return {
            "expected": estimate_trace(PSD, KEY, **options),
            "of NumPy": estimate_trace(np.asarray(PSD), KEY, **options),
            "function": estimate_trace(lambda v: PSD @ v, KEY, size=N, **options),
            "function of a shape": estimate_trace(lambda v: PSD @ v, KEY, size=vector, **options),
            "operator": estimate_trace(lineax.MatrixLinearOperator(PSD, tag), KEY, **options),
            "function of lineax": estimate_trace(
                lineax.FunctionLinearOperator(lambda v: PSD @ v, vector, tag), KEY, **options
            ),
        }

    assert_each_close(run())


@fast_and_slow(ESTIMATORS[:1], ESTIMATORS[3:])
def test_functions_of_pytrees(estimator: Any) -> None:
    options = {"estimator": estimator, "num_matvecs": 2}  # as the rank is: more have only rounding errors

    def matvec(v: Any) -> Any:
        return jax.jvp(jax.grad(loss), (PARAMETERS,), (v,))[1]

    @jax.jit
    def run() -> dict[str, Any]:
        return {
            "expected": estimate_trace(hessian_of_loss(), KEY, **options),
            "like arrays": estimate_trace(matvec, KEY, size=PARAMETERS, **options),
            "like shapes": estimate_trace(matvec, KEY, size=jax.eval_shape(lambda: PARAMETERS), **options),
        }

    assert_each_close(run())


@fast_and_slow(ESTIMATORS[:1], ESTIMATORS[3:])
def test_jacobians_and_hessians_of_lineax(estimator: Any) -> None:
    options = {"estimator": estimator, "num_matvecs": 2}  # as the rank is: more have only rounding errors
    gradient = lambda p, _: jax.grad(loss)(p)
    operator = lambda p: lineax.JacobianLinearOperator(gradient, p, tags=lineax.positive_semidefinite_tag)
    moved_by = lambda t: jax.tree.map(lambda x: x + t, PARAMETERS)
    value_at = lambda p: estimate_trace(operator(p), KEY, **options)

    @jax.jit
    def run() -> dict[str, Any]:
        return {
            "expected": estimate_trace(hessian_of_loss(), KEY, **options),
            "Jacobian": value_at(PARAMETERS),
            "linearised": estimate_trace(lineax.linearise(operator(PARAMETERS)), KEY, **options),
        }

    assert_each_close(run())
    # Differentiated with respect to the point at which the Jacobian is taken.
    value_and_rate = jax.jit(lambda t: jax.value_and_grad(lambda p: value_at(p).value)(moved_by(t)))
    slope = (value_and_rate(1e-4)[0] - value_and_rate(-1e-4)[0]) / 2e-4
    assert_close(sum(float(rate.sum()) for rate in jax.tree.leaves(value_and_rate(0.0)[1])), float(slope), 1e-5)


def operators() -> dict[str, Any]:
    diagonal, tag = jnp.asarray(np.arange(1.0, N + 1)), lineax.positive_semidefinite_tag
    off_diagonal = [jnp.asarray(np.arange(1.0, N) + i) for i in (1, 0)]
    matrix = lineax.MatrixLinearOperator(GENERAL)
    return {
        "diagonal": lineax.DiagonalLinearOperator(diagonal),
        "tridiagonal": lineax.TridiagonalLinearOperator(diagonal, *off_diagonal),
        "identity": lineax.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), float)),
        "sum": matrix + lineax.MatrixLinearOperator(PSD),
        "product": matrix @ matrix.T,
        "scaled": 3.0 * matrix,
        "tagged": lineax.TaggedLinearOperator(lineax.MatrixLinearOperator(PSD), tag),
        "negative": -lineax.MatrixLinearOperator(PSD, tag),
    }


@pytest.mark.parametrize("name", operators())
def test_operators_of_lineax(name: str) -> None:
    operator = operators()[name]
    is_semidefinite = lineax.is_positive_semidefinite(operator) or lineax.is_negative_semidefinite(operator)

    @eqx.filter_jit
    def run(operator: Any) -> Any:
        matrix, of_all = operator.as_matrix(), None
        some = [estimate_trace(x, KEY, num_matvecs=4) for x in (operator, matrix)]
        if is_semidefinite:
            of_all = estimate_trace(operator, KEY, estimator=XNysTrace(), num_matvecs=N).value
        return matrix, some, of_all

    matrix, some, of_all = run(operator)
    assert_close(some[0], some[1])
    assert (some[0].value.shape, some[0].value.dtype) == ((), jnp.float64)
    if is_semidefinite:
        assert_close(of_all, np.trace(matrix), 1e-7)
    else:
        with raises(ValueError, "not declared", "lineax.positive_semidefinite_tag", "XTrace()"):
            estimate_trace(operator, KEY, estimator=XNysTrace(), num_matvecs=N)


def test_a_basis_of_the_whole_space_of_an_operator_of_lineax() -> None:
    """Also of one that is not symmetric."""
    operator = operators()["sum"]
    got = jax.jit(lambda: estimate_trace(operator, KEY, estimator=XTrace(), num_matvecs=2 * N))()
    assert_close(got.value, np.trace(np.asarray(GENERAL) + np.asarray(PSD)), 1e-8)


def test_a_negative_semidefinite_operator() -> None:
    options = {"estimator": XNysTrace(), "num_matvecs": 5}

    @jax.jit
    def run() -> Any:
        negative = lineax.MatrixLinearOperator(-PSD, lineax.negative_semidefinite_tag)
        positive = lineax.MatrixLinearOperator(PSD, lineax.positive_semidefinite_tag)
        return [estimate_trace(operator, KEY, **options) for operator in (negative, positive)]

    negative, positive = run()
    expected = positive._replace(value=-positive.value, skewness=-positive.skewness)
    assert_close(negative, expected)


@each_estimator_two_fast
@pytest.mark.parametrize(
    "dtype",
    [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64, jnp.complex128],
    ids=["bf16", "f16", "f32", "c64", "c128"],
)
def test_the_dtype_is_that_of_the_operator_and_float32_at_least(estimator: Any, dtype: Any) -> None:
    seen = []

    def matvec(v: Any) -> Any:
        seen.append(v.dtype)
        return PSD.astype(dtype) @ v

    vector = jax.ShapeDtypeStruct((N,), dtype)
    got = jax.jit(lambda: estimate_trace(matvec, KEY, estimator=estimator, num_matvecs=12, size=vector))()
    assert set(seen) == {jnp.dtype(dtype)}
    assert got.value.dtype == (dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)
    assert got.std_error.dtype == jnp.finfo(got.value.dtype).dtype
    assert abs(np.asarray(got.value) - np.trace(PSD)) < 5 * np.asarray(got.std_error) + 0.05


def test_a_function_that_returns_complex_numbers_is_given_complex_probes() -> None:
    matrix = jnp.asarray(np.asarray(PSD) + 1j * np.asarray(GENERAL))
    run = jax.jit(lambda: estimate_trace(lambda v: matrix @ v.astype(complex), KEY, num_matvecs=4, size=N))
    assert_close(run(), compiled(Hutchinson(), num_matvecs=4)(matrix))


def test_an_operator_with_a_loop_and_checks_of_its_own() -> None:
    def matvec(v: Any) -> Any:
        return lx.fori_loop(0, jnp.int32(2), lambda _, x: PSD @ x, v, max_steps=3)

    got = jax.jit(lambda: estimate_trace(matvec, KEY, num_matvecs=5, size=N))()
    assert_close(got, compiled(Hutchinson(), num_matvecs=5)(np.asarray(PSD) @ np.asarray(PSD)))
