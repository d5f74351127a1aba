"""What a trace can be taken of, and the errors for what it cannot."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import loopax as lx
from loopax.stochtrace import Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import ESTIMATORS, GENERAL, KEY, PSD, TWO_ESTIMATORS, N, estimate, name_of
from tests.support.limited_loops import RUN_TIME, raises
from tests.support.reference import assert_close

lineax = pytest.importorskip("lineax")
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=name_of)
two_estimators = pytest.mark.parametrize("estimator", TWO_ESTIMATORS, ids=name_of)
PARAMETERS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.array([0.1, -0.4])}


def loss(p: Any) -> Any:
    """Convex, with a Hessian that is not diagonal."""
    return (jnp.cosh(p["w"] @ jnp.arange(1.0, 4.0) / 4 + p["b"]) ** 2).sum()


def hessian_of_loss() -> Any:
    flat, unravel = ravel_pytree(PARAMETERS)
    return jax.hessian(lambda x: loss(unravel(x)))(flat)


@each_estimator
def test_a_function_a_matrix_and_an_operator_are_the_same(estimator: Any) -> None:
    expected = estimate(estimator)(PSD)
    options = {"estimator": estimator, "num_matvecs": 6}
    assert_close(estimate_trace(np.asarray(PSD), KEY, **options), expected)
    assert_close(estimate_trace(lambda v: PSD @ v, KEY, size=N, **options), expected)
    vector = jax.ShapeDtypeStruct((N,), float)
    assert_close(estimate_trace(lambda v: PSD @ v, KEY, size=vector, **options), expected)
    tag = lineax.positive_semidefinite_tag
    assert_close(estimate_trace(lineax.MatrixLinearOperator(PSD, tag), KEY, **options), expected)
    function = lineax.FunctionLinearOperator(lambda v: PSD @ v, vector, tag)
    assert_close(estimate_trace(function, KEY, **options), expected)


@each_estimator
def test_functions_of_pytrees(estimator: Any) -> None:
    expected = estimate(estimator)(hessian_of_loss())

    def matvec(v: Any) -> Any:
        return jax.jvp(jax.grad(loss), (PARAMETERS,), (v,))[1]

    for size in (PARAMETERS, jax.eval_shape(lambda: PARAMETERS)):
        assert_close(estimate_trace(matvec, KEY, estimator=estimator, num_matvecs=6, size=size), expected)


@two_estimators
def test_jacobians_and_hessians_of_lineax(estimator: Any) -> None:
    expected = estimate(estimator)(hessian_of_loss())
    tag = lineax.positive_semidefinite_tag
    gradient = lambda p, _: jax.grad(loss)(p)
    operator = lineax.JacobianLinearOperator(gradient, PARAMETERS, tags=tag)
    options = {"estimator": estimator, "num_matvecs": 6}
    assert_close(estimate_trace(operator, KEY, **options), expected)
    assert_close(estimate_trace(lineax.linearise(operator), KEY, **options), expected)
    # Differentiated with respect to the point at which the Jacobian is taken.
    value = lambda p: estimate_trace(lineax.JacobianLinearOperator(gradient, p, tags=tag), KEY, **options).value
    rate = jax.tree.map(jnp.ones_like, PARAMETERS)
    moved = lambda t: value(jax.tree.map(lambda x, r: x + t * r, PARAMETERS, rate))
    got = jax.tree.map(jnp.vdot, jax.grad(value)(PARAMETERS), rate)
    assert_close(sum(jax.tree.leaves(got)), (moved(1e-4) - moved(-1e-4)) / 2e-4, 1e-5)


def operators() -> dict[str, Any]:
    diagonal, tag = jnp.arange(1.0, N + 1), lineax.positive_semidefinite_tag
    matrix = lineax.MatrixLinearOperator(GENERAL)
    return {
        "diagonal": lineax.DiagonalLinearOperator(diagonal),
        "tridiagonal": lineax.TridiagonalLinearOperator(diagonal, diagonal[1:], diagonal[:-1]),
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
    got = estimate_trace(operator, KEY, estimator=XTrace(), num_matvecs=2 * N)
    assert_close(got.value, jnp.trace(operator.as_matrix()), 1e-8)
    shape = eqx.filter_eval_shape(estimate_trace, operator, KEY, num_matvecs=4)
    assert (shape.value.shape, shape.value.dtype) == ((), jnp.float64)
    if lineax.is_positive_semidefinite(operator) or lineax.is_negative_semidefinite(operator):
        got = estimate_trace(operator, KEY, estimator=XNysTrace(), num_matvecs=N)
        assert_close(got.value, jnp.trace(operator.as_matrix()), 1e-7)
    else:
        with raises(ValueError, "not declared", "lineax.positive_semidefinite_tag", "XTrace()"):
            estimate_trace(operator, KEY, estimator=XNysTrace(), num_matvecs=N)


def test_a_negative_semidefinite_operator() -> None:
    tag, options = lineax.negative_semidefinite_tag, {"estimator": XNysTrace(), "num_matvecs": 5}
    got = estimate_trace(lineax.MatrixLinearOperator(-PSD, tag), KEY, **options)
    positive = estimate_trace(lineax.MatrixLinearOperator(PSD, lineax.positive_semidefinite_tag), KEY, **options)
    assert_close(got, positive._replace(value=-positive.value))


@each_estimator
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64, jnp.complex128])
def test_the_dtype_is_that_of_the_operator_and_float32_at_least(estimator: Any, dtype: Any) -> None:
    seen = []

    def matvec(v: Any) -> Any:
        seen.append(v.dtype)
        return PSD.astype(dtype) @ v

    vector = jax.ShapeDtypeStruct((N,), dtype)
    got = estimate_trace(matvec, KEY, estimator=estimator, num_matvecs=12, size=vector)
    assert set(seen) == {jnp.dtype(dtype)}
    assert got.value.dtype == (dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)
    assert got.std_error.dtype == got.value.real.dtype
    assert abs(got.value - jnp.trace(PSD).astype(got.value.dtype)) < 5 * got.std_error + 0.05


def test_a_function_that_returns_complex_numbers_is_given_complex_probes() -> None:
    matrix = jax.lax.complex(PSD, GENERAL)
    got = estimate_trace(lambda v: matrix @ v.astype(complex), KEY, num_matvecs=4, size=N)
    assert_close(got, estimate(Hutchinson(), num_matvecs=4)(matrix))


def test_an_operator_with_a_loop_and_checks_of_its_own() -> None:
    def matvec(v: Any) -> Any:
        return lx.fori_loop(0, jnp.int32(2), lambda _, x: PSD @ x, v, max_steps=3)

    got = jax.jit(lambda: estimate_trace(matvec, KEY, num_matvecs=5, size=N))()
    assert_close(got, estimate(Hutchinson(), num_matvecs=5)(PSD @ PSD))


# ---- errors


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({}, ValueError, ["neither", "num_matvecs=", "rtol="]),
        ({"num_matvecs": 4, "rtol": 0.1, "max_matvecs": 9}, ValueError, ["both"]),
        ({"rtol": 0.1}, ValueError, ["max_matvecs=None", "tolerance"]),
        ({"atol": 0.1}, ValueError, ["max_matvecs=None", "tolerance"]),
        ({"rtol": -0.1, "max_matvecs": 9}, ValueError, ["rtol=...", "-0.1", "not negative"]),
        ({"rtol": float("nan"), "max_matvecs": 9}, ValueError, ["rtol=...", "nan"]),
        ({"atol": "small", "max_matvecs": 9}, TypeError, ["atol=...", "small", "one number"]),
        ({"atol": jnp.ones(2), "max_matvecs": 9}, TypeError, ["atol=...", "float64[2]", "one number"]),
        ({"num_matvecs": 2.0}, TypeError, ["num_matvecs=...", "2.0"]),
        ({"num_matvecs": True}, TypeError, ["num_matvecs=..."]),
        ({"num_matvecs": 5, "max_matvecs": 4}, ValueError, ["num_matvecs=5", "max_matvecs is 4"]),
        ({"num_matvecs": 5, "max_matvecs": 0}, ValueError, ["max_matvecs=...", "at least 1"]),
        ({"num_matvecs": 5, "max_matvecs": 4.5}, TypeError, ["max_matvecs=...", "4.5"]),
        ({"num_matvecs": 5, "batch": 0}, ValueError, ["batch=...", "at least 1"]),
        ({"num_matvecs": 5, "batch": jnp.int32(2)}, TypeError, ["batch=...", "Two ways out"]),
        ({"num_matvecs": 5, "estimator": "xtrace"}, TypeError, ["estimator=...", "'xtrace'", "XTrace()"]),
        ({"num_matvecs": 5, "estimator": XTrace}, TypeError, ["estimator=...", "XTrace()"]),
        ({"num_matvecs": 5, "size": N}, ValueError, ["size=12", "a matrix", "Leave `size` out"]),
        ({"num_matvecs": 5, "key": 0}, TypeError, ["key=...", "jax.random.key"]),
    ],
)
def test_options(options: dict[str, Any], error: Any, parts: list[str]) -> None:
    with raises(error, "estimate_trace(", *parts):
        given: Any = {"key": KEY} | options
        estimate_trace(PSD, **given)


@pytest.mark.parametrize(
    ("estimator", "least", "most"),
    [
        (Hutchinson(), 1, None),
        (HutchPlusPlus(), 3, 36),
        (XTrace(), 2, 24),
        (XNysTrace(positive_semidefinite=True), 1, 12),
    ],
    ids=name_of,
)
def test_too_few_and_too_many_products(estimator: Any, least: int, most: int | None) -> None:
    name = type(estimator).__name__
    with raises(ValueError, f"num_matvecs={least - 1}", name, f"at least {least}"):
        estimate(estimator, num_matvecs=least - 1)(PSD)
    with raises(ValueError, "max_matvecs", f"{least - 1}"):
        estimate(estimator, rtol=0.1, max_matvecs=least - 1)(PSD)
    if most is None:
        assert estimate(estimator, num_matvecs=100)(PSD).num_matvecs == 100
    else:
        too_many = most + least
        with raises(ValueError, f"num_matvecs={too_many}", name, "12 elements", f"at most {most}", "exactly"):
            estimate(estimator, num_matvecs=too_many)(PSD)
    for wrong in (least - 1, N + 1, -5):
        run = eqx.filter_jit(lambda n: estimate(estimator, num_matvecs=n, max_matvecs=N)(PSD))
        with raises(RUN_TIME, f"num_matvecs is less than {least}", name, f"max_matvecs, which is {N}"):
            run(jnp.int32(wrong)).value.block_until_ready()


@pytest.mark.parametrize("name", ["num_matvecs", "max_matvecs", "batch"])
def test_traced_numbers(name: str) -> None:
    with raises(TypeError, f"estimate_trace({name}=...)", "traced", "Two ways out", "static_argnames"):
        jax.jit(lambda n: estimate(Hutchinson(), **{name: n})(PSD))(4)
    with raises(TypeError, "estimate_trace(size=...)", "traced", "Two ways out"):
        jax.jit(lambda n: estimate_trace(lambda v: v, KEY, num_matvecs=4, size=n))(4)


def test_a_number_that_is_known_may_be_an_array() -> None:
    assert_close(estimate(Hutchinson(), num_matvecs=jnp.int32(6))(PSD), estimate(Hutchinson())(PSD))
    compiled = jax.jit(lambda: estimate(Hutchinson(), num_matvecs=np.int64(6))(PSD))
    assert_close(compiled(), estimate(Hutchinson())(PSD))


@pytest.mark.parametrize(
    ("operator", "size", "error", "parts"),
    [
        (jnp.ones((2, 3)), None, ValueError, ["shape (2, 3)", "square matrix"]),
        (jnp.ones(3), None, ValueError, ["shape (3,)", "square matrix"]),
        (jnp.ones((2, 3, 3)), None, ValueError, ["shape (2, 3, 3)", "jax.vmap"]),
        (jnp.ones((2, 2), int), None, TypeError, ["int64", "floating or complex"]),
        (jnp.ones((0, 0)), None, ValueError, ["no elements"]),
        ("A", None, TypeError, ["'A'", "a square matrix, a function"]),
        ([[1.0]], None, TypeError, ["a square matrix, a function"]),
        (lambda v: v, None, TypeError, ["size=None", "Give `size=`"]),
        (lambda v: v, 0, ValueError, ["size=...", "at least 1"]),
        (lambda v: v, {}, ValueError, ["no elements"]),
        (lambda v: v[:2], 3, ValueError, ["float64[3]", "float64[2]"]),
        (lambda v: (v, v), 3, ValueError, ["float64[3]"]),
        (lambda v: v, jax.ShapeDtypeStruct((3,), int), TypeError, ["int64", "floating or complex"]),
        (lambda v: v, (jnp.ones(2), jnp.ones(2, jnp.float32)), TypeError, ["float32, float64", "one"]),
        (
            lambda v: v.astype(jnp.complex64),
            jax.ShapeDtypeStruct((3,), jnp.float32),
            TypeError,
            ["complex64", "probes"],
        ),
    ],
)
def test_what_is_no_square_operator(operator: Any, size: Any, error: Any, parts: list[str]) -> None:
    with raises(error, "estimate_trace(", *parts):
        estimate_trace(operator, KEY, num_matvecs=2, size=size)


def test_an_operator_that_is_not_square() -> None:
    with raises(ValueError, "3 elements", "of 2", "square"):
        estimate_trace(lineax.MatrixLinearOperator(jnp.ones((2, 3))), KEY, num_matvecs=2)


def test_a_function_that_fails_says_what_it_was_given() -> None:
    x = jnp.ones(3, jnp.float32)
    matvec = lambda v: jax.jvp(jnp.sin, (x,), (v,))[1]
    with pytest.raises(TypeError) as error:
        estimate_trace(matvec, KEY, num_matvecs=2, size=3)
    note = "".join(error.value.__notes__)
    assert "float64[3]" in note
    assert "jax.ShapeDtypeStruct" in note
    assert estimate_trace(matvec, KEY, num_matvecs=2, size=x).value.dtype == jnp.float32


@pytest.mark.parametrize("estimator", [Hutchinson, HutchPlusPlus, XTrace, XNysTrace])
def test_unknown_probes(estimator: Any) -> None:
    with raises(ValueError, f"{estimator.__name__}(probes=...)", "'gaussian'", "'rademacher', 'normal', 'sphere'"):
        estimator("gaussian")


def test_xnystrace_wants_a_declaration() -> None:
    with raises(ValueError, "XNysTrace()", "not declared", "positive_semidefinite=True"):
        estimate_trace(PSD, KEY, estimator=XNysTrace(), num_matvecs=3)
