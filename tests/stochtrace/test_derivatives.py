"""Derivatives of estimates are those of the estimate from the same probes, in every mode and order."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax.stochtrace import Hutchinson, XNysTrace, estimate_trace
from tests.stochtrace.cases import (
    ESTIMATORS,
    GENERAL,
    KEY,
    PSD,
    TURNED,
    WITH_BASIS,
    N,
    each_estimator,
    each_estimator_two_fast,
    estimate,
    fast_and_slow,
    name_of,
    value_along,
    with_eigenvalues,
)
from tests.support.compiled import temporary_of
from tests.support.reference import assert_close


def slope(f: Any, t: float, step: float = 1e-4) -> np.ndarray:
    """A central difference of fourth order."""
    near, far = (np.asarray(f(t + by)) - np.asarray(f(t - by)) for by in (step, 2 * step))
    return (8 * near - far) / (12 * step)


OPTIONS: dict[str, Any] = {
    "bound": {"num_matvecs": 9, "max_matvecs": 12, "batch": 4},
    "tolerance not reached": {"rtol": 0.03},
    "tolerance": {"rtol": 0.5},
}


@each_estimator_two_fast
@pytest.mark.parametrize("how", OPTIONS)
def test_value_error_and_skewness_in_both_modes(estimator: Any, how: str) -> None:
    weights = np.array([1.0, -0.7, 0.4, 0.2])  # a derivative in reverse is of a combination of all
    # With all 12 the error is rounding.
    options = {"max_matvecs": 10 * estimator.products_per_sample} | OPTIONS[how]

    def results(t: Any) -> Any:
        turned = jnp.eye(N) + jnp.sin(t) * TURNED
        found = estimate(estimator, **options)(turned @ PSD @ turned.T)
        return jnp.stack([found.value, found.std_error, found.skewness, found.interval()[0]])

    run = jax.jit(lambda t: [*jax.jvp(results, (t,), (1.0,)), jax.grad(lambda t: weights @ results(t))(t)])
    expected = slope(lambda t: run(t)[0], 0.3)
    assert_close(run(0.3)[1:], [expected, weights @ expected], 1e-7)


@fast_and_slow(ESTIMATORS[:1], ESTIMATORS[1:])
def test_first_and_second_derivatives(estimator: Any) -> None:
    value, modes = value_along(estimator), (jax.jacfwd, jax.jacrev)
    seconds = [outer(inner(value)) for outer in modes for inner in modes]
    run = jax.jit(lambda t: [value(t), jax.grad(value)(t), [second(t) for second in seconds]])
    assert_close(run(0.3)[1], slope(lambda t: run(t)[0], 0.3), 1e-7)
    assert_close(run(0.3)[2], 4 * [slope(lambda t: run(t)[1], 0.3)], 1e-6)


@each_estimator
def test_beyond_the_rank(estimator: Any) -> None:
    """What rounding errors have made of a basis beyond the rank is in no derivative."""
    matvecs = 5 * estimator.products_per_sample

    @jax.jit
    def run(t: Any, matrix: Any) -> Any:
        turned = lambda t: jnp.eye(N) + jnp.sin(t) * TURNED
        value = value_along(estimator, matrix, num_matvecs=matvecs)
        exact = jax.grad(lambda t: jnp.trace(turned(t) @ matrix @ turned(t).T))(t)
        return [*jax.jvp(value, (t,), (1.0,)), jax.grad(value)(t), exact]

    for eigenvalues in ([3.0, 2.0], [3.0, 2.0, 1.0]):
        matrix = with_eigenvalues(eigenvalues)
        _, *derivatives, exact = run(0.3, matrix)
        assert_close(derivatives, [slope(lambda t, matrix=matrix: run(t, matrix)[0], 0.3)] * 2, 1e-7)
        if not isinstance(estimator, Hutchinson):
            assert_close(derivatives[1], exact, 1e-7)


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if not isinstance(e, XNysTrace)], ids=name_of)
def test_of_a_matrix_that_is_not_symmetric(estimator: Any) -> None:
    run = jax.jit(jax.value_and_grad(lambda t: estimate(estimator)(GENERAL + t * TURNED).value))
    assert_close(run(0.3)[1], slope(lambda t: run(t)[0], 0.3), 1e-7)


@each_estimator_two_fast
def test_of_a_complex_operator(estimator: Any) -> None:
    hermitian = jnp.asarray(np.asarray(PSD) + 1j * (np.asarray(GENERAL) - np.asarray(GENERAL).T) / 8)

    def value(t: Any) -> Any:
        turned = jnp.eye(N, dtype=complex) + jax.lax.complex(t * TURNED, t**2 * TURNED.T)
        return estimate(estimator)(turned @ hermitian @ hermitian.conj().T @ turned.conj().T).value.real

    run = jax.jit(lambda t: [*jax.jvp(value, (t,), (1.0,)), jax.grad(value)(t)])
    expected = slope(lambda t: run(t)[0], 0.3)
    assert_close(run(0.3)[1:], [expected] * 2, 1e-6)


@each_estimator_two_fast
def test_lanes_are_differentiated_as_if_they_were_alone(estimator: Any) -> None:
    counts, ts = np.array([3, 12, 6]), np.array([0.1, 0.2, 0.3])
    value = lambda t, n: value_along(estimator, num_matvecs=n, max_matvecs=N)(t)
    gradient = jax.jit(jax.grad(value))
    alone = np.stack([gradient(t, n) for t, n in zip(ts, counts, strict=True)])
    assert_close(jax.jit(jax.vmap(jax.grad(value)))(ts, counts), alone)
    assert_close(jax.jit(jax.grad(lambda ts: jax.vmap(value)(ts, counts).sum()))(ts), alone)


def test_in_a_loop_and_of_what_a_function_closes_over() -> None:
    """Also of integers beside."""

    def value(t: Any, at: Any) -> Any:
        turned = jnp.eye(N) + jnp.sin(t) * TURNED
        matvec = lambda v: turned @ (PSD @ (turned.T @ v)) + 0.0 * at.astype(float)
        return estimate_trace(matvec, KEY, num_matvecs=6, size=N).value

    summed = lambda t: lx.fori_loop(0, 3, lambda _, total: total + value(t, jnp.arange(N)), 0.0)
    expected = jax.jit(jax.grad(value_along(ESTIMATORS[0])))(0.3)
    assert_close(jax.jit(lambda t: [jax.grad(summed)(t), jax.jacfwd(summed)(t)])(0.3), [3 * expected] * 2)


def test_what_is_not_perturbed_is_not_differentiated() -> None:
    """The tangent of a matrix that does not move would be as large as it: one loop for values, one for derivatives."""
    value = lambda s: estimate_trace(lambda v: s * (GENERAL @ v), KEY, num_matvecs=4, size=N).value
    tangents = str(jax.make_jaxpr(lambda s: jax.jvp(value, (s,), (1.0,)))(1.0)).count(f"f64[{N},{N}]")
    assert tangents <= 2 * str(jax.make_jaxpr(value)(1.0)).count(f"f64[{N},{N}]")


def test_the_memory_of_hutchinson_does_not_grow_with_the_number_of_products() -> None:
    scale = jax.ShapeDtypeStruct((1024,), float)
    for options in ({}, {"max_matvecs": 10**6}):

        def value(scale: Any, n: int, options: Any = options) -> Any:
            return estimate_trace(lambda v: jnp.sin(scale) * v, KEY, size=1024, num_matvecs=n, **options).value

        for f in (value, jax.grad(value)):
            few, many = (temporary_of(partial(f, n=n), scale) for n in (64, 4096))
            assert few == many


@pytest.mark.parametrize("estimator", WITH_BASIS, ids=name_of)
def test_the_memory_of_a_basis_is_n_times_the_products(estimator: Any) -> None:
    n, matvecs = 2048, 48
    scale = jax.ShapeDtypeStruct((n,), float)
    value = lambda scale: (
        estimate_trace(lambda v: jnp.exp(scale) * v, KEY, estimator=estimator, num_matvecs=matvecs, size=n).value
    )
    assert temporary_of(value, scale) < 4 * n * matvecs * 8
    assert temporary_of(jax.grad(value), scale) < 12 * n * matvecs * 8


@pytest.mark.parametrize(("scale", "options"), [(1e-6, {"rtol": 0.1}), (1.0, {"atol": np.inf})], ids=str)
def test_a_raised_standard_error_has_finite_derivatives(scale: float, options: dict[str, Any]) -> None:
    matrix = scale * np.asarray(PSD, np.float32)
    error = lambda matrix: estimate(ESTIMATORS[0], max_matvecs=20, **options)(matrix).std_error
    assert jnp.isfinite(jax.jit(jax.grad(error))(matrix)).all()
