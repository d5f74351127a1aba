"""What a trace can be taken of, and the errors for what is none; the fewest products, the most, and low ranks."""

from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import loopax as lx
from loopax._src.stochtrace.factorizations import inverse_by_elimination
from loopax.stochtrace import Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import (
    ESTIMATORS,
    GENERAL,
    KEY,
    PSD,
    WITH_BASIS,
    N,
    compiled,
    each_estimator,
    each_estimator_two_fast,
    estimate,
    fast_and_slow,
    name_of,
    with_eigenvalues,
)
from tests.support.limited_loops import RUN_TIME, raises
from tests.support.reference import assert_close

lineax = pytest.importorskip("lineax")
PARAMETERS = {"w": np.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": np.array([0.1, -0.4])}


def loss(p: Any) -> Any:
    """Convex, with a Hessian that is not diagonal."""
    return (jnp.cosh(p["w"] @ (np.arange(1.0, 4.0) / 4) + p["b"]) ** 2).sum()


@fast_and_slow(ESTIMATORS[:1], ESTIMATORS[3:])
def test_a_function_a_matrix_and_an_operator_are_the_same(estimator: Any) -> None:
    of = partial(estimate_trace, key=KEY, estimator=estimator, num_matvecs=6)
    vector, tag, product = jax.ShapeDtypeStruct((N,), float), lineax.positive_semidefinite_tag, lambda v: PSD @ v

    @jax.jit
    def run() -> list[Any]:
        operators = lineax.MatrixLinearOperator(PSD, tag), lineax.FunctionLinearOperator(product, vector, tag)
        functions = [of(product, size=size) for size in (N, vector)]
        return [of(PSD), of(np.asarray(PSD)), *map(of, operators), *functions]

    expected, *others = run()
    assert_close(others, [expected] * 5)


@fast_and_slow(ESTIMATORS[:1], ESTIMATORS[3:])
def test_functions_of_pytrees_and_jacobians_of_lineax(estimator: Any) -> None:
    of = partial(estimate_trace, key=KEY, estimator=estimator, num_matvecs=2)  # as the rank is: others are rounding
    matvec = lambda v: jax.jvp(jax.grad(loss), (PARAMETERS,), (v,))[1]
    gradient = lambda p, _: jax.grad(loss)(p)
    operator = lambda p: lineax.JacobianLinearOperator(gradient, p, tags=lineax.positive_semidefinite_tag)
    flat, unravel = ravel_pytree(PARAMETERS)

    @jax.jit
    def run() -> list[Any]:
        functions = [of(matvec, size=size) for size in (PARAMETERS, jax.eval_shape(lambda: PARAMETERS))]
        operators = operator(PARAMETERS), lineax.linearise(operator(PARAMETERS))
        return [of(jax.hessian(lambda x: loss(unravel(x)))(flat)), *functions, *map(of, operators)]

    expected, *others = run()
    assert_close(others, [expected] * 4)
    # Differentiated with respect to the point at which the Jacobian is taken.
    moved_by = lambda t: jax.tree.map(lambda x: x + t, PARAMETERS)
    value_and_rate = jax.jit(lambda t: jax.value_and_grad(lambda p: of(operator(p)).value)(moved_by(t)))
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


@each_estimator_two_fast
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.complex64], ids=["bf16", "f32", "c64"])
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


OPTIONS: Any = [
    ({"num_matvecs": 4, "rtol": 0.1, "max_matvecs": 9}, ValueError, ["both"]),
    ({"rtol": 0.1}, ValueError, ["max_matvecs=None", "tolerance"]),
    ({"rtol": float("nan"), "max_matvecs": 9}, ValueError, ["rtol=...", "nan"]),
    ({"atol": jnp.asarray(np.ones(2)), "max_matvecs": 9}, TypeError, ["atol=...", "float64[2]", "one number"]),
    ({"num_matvecs": 2.0}, TypeError, ["num_matvecs=...", "2.0"]),
    ({"num_matvecs": 5, "max_matvecs": 4}, ValueError, ["num_matvecs=5", "max_matvecs is 4"]),
    ({"num_matvecs": 5, "batch": 0}, ValueError, ["batch=...", "at least 1"]),
    ({"num_matvecs": 5, "batch": jnp.int32(2)}, TypeError, ["batch=...", "Two ways out"]),
    ({"num_matvecs": 5, "estimator": XTrace}, TypeError, ["estimator=...", "XTrace()"]),
    ({"num_matvecs": 5, "size": N}, ValueError, ["size=12", "a matrix", "Leave `size` out"]),
    ({"num_matvecs": 5, "key": 0}, TypeError, ["key=...", "jax.random.key"]),
]


def test_options() -> None:
    for options, error, parts in OPTIONS:
        with raises(error, "estimate_trace(", *parts):
            estimate_trace(PSD, **{"key": KEY} | options)


LIMITS = [
    (Hutchinson(), 1, None),
    (HutchPlusPlus(), 3, 36),
    (XTrace(), 2, 24),
    (XNysTrace(positive_semidefinite=True), 1, 12),
]


@pytest.mark.parametrize(("estimator", "least", "most"), LIMITS, ids=name_of)
def test_too_few_and_too_many_products(estimator: Any, least: int, most: int | None) -> None:
    name = type(estimator).__name__
    with raises(ValueError, f"{name}(probes=...)", "'gaussian'", "'rademacher', 'normal', 'sphere'"):
        type(estimator)("gaussian")
    with raises(ValueError, f"num_matvecs={least - 1}", name, f"at least {least}"):
        estimate(estimator, num_matvecs=least - 1)(PSD)
    with raises(ValueError, "max_matvecs", f"{least - 1}"):
        estimate(estimator, rtol=0.1, max_matvecs=least - 1)(PSD)
    if most is None:
        assert compiled(estimator, num_matvecs=100)(PSD).num_matvecs == 100
    else:
        too_many = most + least
        with raises(ValueError, f"num_matvecs={too_many}", name, "12 elements", f"at most {most}", "exactly"):
            estimate(estimator, num_matvecs=too_many)(PSD)
    run = eqx.filter_jit(lambda n: estimate(estimator, num_matvecs=n, max_matvecs=N)(PSD))
    for wrong in (least - 1, N + 1, -5):
        with raises(RUN_TIME, f" is less than {least}", name, f"max_matvecs, which is {N}"):
            run(np.int32(wrong)).value.block_until_ready()


def test_traced_numbers() -> None:
    for name in ("num_matvecs", "max_matvecs", "batch"):
        with raises(TypeError, f"estimate_trace({name}=...)", "traced", "Two ways out", "static_argnames"):
            jax.jit(lambda n, name=name: estimate(Hutchinson(), **{name: n})(PSD))(4)
    with raises(TypeError, "estimate_trace(size=...)", "traced", "Two ways out"):
        jax.jit(lambda n: estimate_trace(lambda v: v, KEY, num_matvecs=4, size=n))(4)
    expected = compiled(Hutchinson())(PSD)  # a number that is known may be an array
    assert_close(estimate(Hutchinson(), num_matvecs=jnp.int32(6))(PSD), expected)


SINGLE, OTHER = jax.ShapeDtypeStruct((3,), jnp.float32), lineax.MatrixLinearOperator(jnp.asarray(np.ones((2, 3))))
NOT_SQUARE: Any = [
    (np.ones((2, 3)), None, ValueError, ["shape (2, 3)", "square matrix"]),
    (np.ones((2, 3, 3)), None, ValueError, ["shape (2, 3, 3)", "jax.vmap"]),
    (np.ones((2, 2), int), None, TypeError, ["int64", "floating or complex"]),
    (np.ones((0, 0)), None, ValueError, ["no elements"]),
    ("A", None, TypeError, ["'A'", "a square matrix, a function"]),
    (OTHER, None, ValueError, ["3 elements", "of 2", "square"]),
    (lambda v: v, 0, ValueError, ["size=...", "at least 1"]),
    (lambda v: v[:2], 3, ValueError, ["float64[3]", "float64[2]"]),
    (lambda v: v, jax.ShapeDtypeStruct((3,), int), TypeError, ["int64", "floating or complex"]),
    (lambda v: v, (np.ones(2), np.ones(2, np.float32)), TypeError, ["float32, float64", "one"]),
    (lambda v: v.astype(jnp.complex64), SINGLE, TypeError, ["complex64", "probes"]),
]


def test_what_is_no_square_operator() -> None:
    for operator, size, error, parts in NOT_SQUARE:
        with raises(error, "estimate_trace(", *parts):
            estimate_trace(operator, KEY, num_matvecs=2, size=size)


def test_a_function_that_fails_says_what_it_was_given() -> None:
    x = np.ones(3, np.float32)
    matvec = lambda v: jax.jvp(jnp.sin, (x,), (v,))[1]
    with pytest.raises(TypeError) as error:
        estimate_trace(matvec, KEY, num_matvecs=2, size=3)
    note = "".join(error.value.__notes__)
    assert "float64[3]" in note
    assert "jax.ShapeDtypeStruct" in note
    assert estimate_trace(matvec, KEY, num_matvecs=2, size=x).value.dtype == jnp.float32


with_basis = pytest.mark.parametrize("estimator", WITH_BASIS, ids=name_of)
each_batch = pytest.mark.parametrize("batch", [5, 12])  # uneven ones, a single one


def samples_in_batches(estimator: Any, samples: int, batch: int, matrix: Any) -> Any:
    """Of an estimate that has room for as many samples as there are elements: one program for all tests here."""
    per_sample = estimator.products_per_sample
    return compiled(estimator, max_matvecs=N * per_sample, batch=batch)(matrix, num_matvecs=samples * per_sample)


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


def test_estimates_and_their_gradients_call_no_triangular_solve():
    for estimator in (XNysTrace(positive_semidefinite=True), XTrace()):
        value = lambda m, e=estimator: estimate_trace(m, jax.random.key(0), num_matvecs=32, estimator=e).value
        program = jax.jit(jax.value_and_grad(value)).lower(jax.ShapeDtypeStruct((40, 40), float)).as_text()
        assert "lapack_dgetrf" in program
        assert "trsm" not in program
