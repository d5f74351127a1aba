"""Errors for what no trace can be taken of, and for options that make no sense."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax.stochtrace import Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import KEY, PSD, N, compiled, estimate, name_of
from tests.support.limited_loops import RUN_TIME, raises
from tests.support.reference import assert_close

lineax = pytest.importorskip("lineax")


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
        ({"atol": jnp.asarray(np.ones(2)), "max_matvecs": 9}, TypeError, ["atol=...", "float64[2]", "one number"]),
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
        assert compiled(estimator, num_matvecs=100)(PSD).num_matvecs == 100
    else:
        too_many = most + least
        with raises(ValueError, f"num_matvecs={too_many}", name, "12 elements", f"at most {most}", "exactly"):
            estimate(estimator, num_matvecs=too_many)(PSD)
    run = eqx.filter_jit(lambda n: estimate(estimator, num_matvecs=n, max_matvecs=N)(PSD))
    for wrong in (least - 1, N + 1, -5):
        with raises(RUN_TIME, f" is less than {least}", name, f"max_matvecs, which is {N}"):
            run(np.int32(wrong)).value.block_until_ready()


@pytest.mark.parametrize("name", ["num_matvecs", "max_matvecs", "batch"])
def test_traced_numbers(name: str) -> None:
    with raises(TypeError, f"estimate_trace({name}=...)", "traced", "Two ways out", "static_argnames"):
        jax.jit(lambda n: estimate(Hutchinson(), **{name: n})(PSD))(4)
    with raises(TypeError, "estimate_trace(size=...)", "traced", "Two ways out"):
        jax.jit(lambda n: estimate_trace(lambda v: v, KEY, num_matvecs=4, size=n))(4)


def test_a_number_that_is_known_may_be_an_array() -> None:
    expected = compiled(Hutchinson())(PSD)
    assert_close(estimate(Hutchinson(), num_matvecs=jnp.int32(6))(PSD), expected)
    assert_close(jax.jit(lambda: estimate(Hutchinson(), num_matvecs=np.int64(6))(PSD))(), expected)


@pytest.mark.parametrize(
    ("operator", "size", "error", "parts"),
    [
        (np.ones((2, 3)), None, ValueError, ["shape (2, 3)", "square matrix"]),
        (np.ones(3), None, ValueError, ["shape (3,)", "square matrix"]),
        (np.ones((2, 3, 3)), None, ValueError, ["shape (2, 3, 3)", "jax.vmap"]),
        (np.ones((2, 2), int), None, TypeError, ["int64", "floating or complex"]),
        (np.ones((0, 0)), None, ValueError, ["no elements"]),
        ("A", None, TypeError, ["'A'", "a square matrix, a function"]),
        ([[1.0]], None, TypeError, ["a square matrix, a function"]),
        (lambda v: v, None, TypeError, ["size=None", "Give `size=`"]),
        (lambda v: v, 0, ValueError, ["size=...", "at least 1"]),
        (lambda v: v, {}, ValueError, ["no elements"]),
        (lambda v: v[:2], 3, ValueError, ["float64[3]", "float64[2]"]),
        (lambda v: (v, v), 3, ValueError, ["float64[3]"]),
        (lambda v: v, jax.ShapeDtypeStruct((3,), int), TypeError, ["int64", "floating or complex"]),
        (lambda v: v, (np.ones(2), np.ones(2, np.float32)), TypeError, ["float32, float64", "one"]),
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
        estimate_trace(lineax.MatrixLinearOperator(jnp.asarray(np.ones((2, 3)))), KEY, num_matvecs=2)


def test_a_function_that_fails_says_what_it_was_given() -> None:
    x = np.ones(3, np.float32)
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
