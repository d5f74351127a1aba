"""What a trace can be taken of, and the errors for what is none."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import loopax as lx
from loopax.stochtrace import Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import (
    ESTIMATORS,
    GENERAL,
    KEY,
    PSD,
    N,
    compiled,
    each_estimator_two_fast,
    estimate,
    fast_and_slow,
    name_of,
)
from tests.support.limited_loops import RUN_TIME, raises
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
    for found in actual.values():
        assert_close(found, expected)


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
def test_functions_of_pytrees_and_jacobians_of_lineax(estimator: Any) -> None:
    options = {"estimator": estimator, "num_matvecs": 2}  # as the rank is: more have only rounding errors
    matvec = lambda v: jax.jvp(jax.grad(loss), (PARAMETERS,), (v,))[1]
    gradient = lambda p, _: jax.grad(loss)(p)
    operator = lambda p: lineax.JacobianLinearOperator(gradient, p, tags=lineax.positive_semidefinite_tag)
    value_at = lambda p: estimate_trace(operator(p), KEY, **options)

    @jax.jit
    def run() -> dict[str, Any]:
        return {
            "expected": estimate_trace(hessian_of_loss(), KEY, **options),
            "like arrays": estimate_trace(matvec, KEY, size=PARAMETERS, **options),
            "like shapes": estimate_trace(matvec, KEY, size=jax.eval_shape(lambda: PARAMETERS), **options),
            "Jacobian": value_at(PARAMETERS),
            "linearised": estimate_trace(lineax.linearise(operator(PARAMETERS)), KEY, **options),
        }

    assert_each_close(run())
    # Differentiated with respect to the point at which the Jacobian is taken.
    moved_by = lambda t: jax.tree.map(lambda x: x + t, PARAMETERS)
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


# ---- errors


OPTIONS: Any = [
    ({"num_matvecs": 4, "rtol": 0.1, "max_matvecs": 9}, ValueError, ["both"]),
    ({"rtol": 0.1}, ValueError, ["max_matvecs=None", "tolerance"]),
    ({"rtol": -0.1, "max_matvecs": 9}, ValueError, ["rtol=...", "-0.1", "not negative"]),
    ({"rtol": float("nan"), "max_matvecs": 9}, ValueError, ["rtol=...", "nan"]),
    ({"atol": "small", "max_matvecs": 9}, TypeError, ["atol=...", "small", "one number"]),
    ({"atol": jnp.asarray(np.ones(2)), "max_matvecs": 9}, TypeError, ["atol=...", "float64[2]", "one number"]),
    ({"num_matvecs": 2.0}, TypeError, ["num_matvecs=...", "2.0"]),
    ({"num_matvecs": 5, "max_matvecs": 4}, ValueError, ["num_matvecs=5", "max_matvecs is 4"]),
    ({"num_matvecs": 5, "max_matvecs": 0}, ValueError, ["max_matvecs=...", "at least 1"]),
    ({"num_matvecs": 5, "batch": 0}, ValueError, ["batch=...", "at least 1"]),
    ({"num_matvecs": 5, "batch": jnp.int32(2)}, TypeError, ["batch=...", "Two ways out"]),
    ({"num_matvecs": 5, "estimator": "xtrace"}, TypeError, ["estimator=...", "'xtrace'", "XTrace()"]),
    ({"num_matvecs": 5, "estimator": XTrace}, TypeError, ["estimator=...", "XTrace()"]),
    ({"num_matvecs": 5, "size": N}, ValueError, ["size=12", "a matrix", "Leave `size` out"]),
    ({"num_matvecs": 5, "key": 0}, TypeError, ["key=...", "jax.random.key"]),
]


@pytest.mark.parametrize(("options", "error", "parts"), OPTIONS)
def test_options(options: dict[str, Any], error: Any, parts: list[str]) -> None:
    with raises(error, "estimate_trace(", *parts):
        given: Any = {"key": KEY} | options
        estimate_trace(PSD, **given)


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
    (np.ones(3), None, ValueError, ["shape (3,)", "square matrix"]),
    (np.ones((2, 3, 3)), None, ValueError, ["shape (2, 3, 3)", "jax.vmap"]),
    (np.ones((2, 2), int), None, TypeError, ["int64", "floating or complex"]),
    (np.ones((0, 0)), None, ValueError, ["no elements"]),
    ("A", None, TypeError, ["'A'", "a square matrix, a function"]),
    (OTHER, None, ValueError, ["3 elements", "of 2", "square"]),
    (lambda v: v, 0, ValueError, ["size=...", "at least 1"]),
    (lambda v: v, {}, ValueError, ["no elements"]),
    (lambda v: v[:2], 3, ValueError, ["float64[3]", "float64[2]"]),
    (lambda v: (v, v), 3, ValueError, ["float64[3]"]),
    (lambda v: v, jax.ShapeDtypeStruct((3,), int), TypeError, ["int64", "floating or complex"]),
    (lambda v: v, (np.ones(2), np.ones(2, np.float32)), TypeError, ["float32, float64", "one"]),
    (lambda v: v.astype(jnp.complex64), SINGLE, TypeError, ["complex64", "probes"]),
]


@pytest.mark.parametrize(("operator", "size", "error", "parts"), NOT_SQUARE)
def test_what_is_no_square_operator(operator: Any, size: Any, error: Any, parts: list[str]) -> None:
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


@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_traced_tolerances_that_are_none(name: str) -> None:
    """As a number of products that is traced; a lane's own raises for all."""
    run = lambda value: estimate(Hutchinson(), max_matvecs=20, **{name: value})(PSD).value
    one, lanes = eqx.filter_jit(run), eqx.filter_jit(jax.vmap(run))
    assert np.isfinite(one(jnp.float64(0.0)))
    assert one(jnp.float64(0.5)) == run(0.5)
    for wrong in (-0.1, float("nan"), -float("inf")):
        with raises(RUN_TIME, "estimate_trace", f"{name} is negative, or NaN"):
            one(jnp.float64(wrong)).block_until_ready()
        with raises(RUN_TIME, f"{name} is negative, or NaN"):
            lanes(jnp.array([0.5, wrong])).block_until_ready()
