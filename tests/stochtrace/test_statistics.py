"""Estimates have the mean and the error that they say; a tolerance ends them as soon as it is met."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax.stochtrace import Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import GENERAL, KEY, PSD, compiled, each_estimator_two_fast, estimate, probes_of
from tests.support.reference import assert_close


def test_a_tolerance_ends_an_estimate_as_soon_as_it_is_met() -> None:
    samples = probes_of("rademacher", 200)
    samples = (samples * (np.asarray(GENERAL) @ samples)).sum(0)
    got = compiled(Hutchinson(), rtol=0.1, atol=1.0, max_matvecs=200)(GENERAL)
    n = int(got.num_matvecs)
    assert 16 < n < 200
    assert got.converged
    for count in range(16, n + 1):
        mean, error = samples[:count].mean(), samples[:count].std(ddof=1) / count**0.5
        assert (error <= 1.0 + 0.1 * abs(mean)) == (count == n)


@each_estimator_two_fast
def test_a_tolerance_is_not_asked_before_sixteen_products_and_not_after_the_last(estimator: Any) -> None:
    samples = -(-16 // estimator.products_per_sample)
    matrix = jnp.asarray(np.eye(20) + np.pad(np.asarray(PSD), (0, 8)))
    soon = compiled(estimator, max_matvecs=20 * estimator.products_per_sample)(matrix, atol=1e9)
    assert soon.num_matvecs == samples * estimator.products_per_sample
    assert soon.converged
    never = compiled(estimator, max_matvecs=3 * estimator.products_per_sample)(PSD, atol=0.0)
    assert never.num_matvecs == 3 * estimator.products_per_sample
    assert not never.converged


def test_complex_signs_vary_half_as_much_as_real_ones() -> None:
    general, psd = np.asarray(GENERAL), np.asarray(PSD)
    matrix = 2 * (psd + 1j * (general - general.T))
    keys = jax.random.split(KEY, 2000)
    run = jax.jit(jax.vmap(lambda key: estimate(Hutchinson(), key=key, num_matvecs=1)(jnp.asarray(matrix)).value))
    got = np.asarray(run(keys))
    off_diagonal = (np.abs(matrix) ** 2).sum() - (np.abs(np.diag(matrix)) ** 2).sum()
    assert_close(got.var() / off_diagonal, 1.0, 0.15)  # and 2 for signs
    assert abs(got.mean() - np.trace(matrix)) < 4 * np.sqrt(off_diagonal / len(keys))


@pytest.mark.slow
@pytest.mark.parametrize("probes", ["rademacher", "normal", "sphere"])
@pytest.mark.parametrize("estimator_class", [Hutchinson, HutchPlusPlus, XTrace, XNysTrace])
def test_the_mean_over_keys_is_the_trace(estimator_class: Any, probes: Any) -> None:
    declared = {"positive_semidefinite": True} if estimator_class is XNysTrace else {}
    estimator = estimator_class(probes, **declared)
    keys = jax.random.split(jax.random.key(3), 4000)
    got = jax.jit(jax.vmap(lambda key: estimate(estimator, key=key, num_matvecs=8)(PSD)))(keys)
    values, errors = np.asarray(got.value), np.asarray(got.std_error)
    assert abs(values.mean() - np.trace(PSD)) < 4 * values.std() / len(keys) ** 0.5
    if estimator_class in (Hutchinson, HutchPlusPlus):  # whose samples are independent
        assert_close((errors**2).mean() / values.var(), 1.0, 0.15)


@jax.jit
def run_with_each_key(matrix: Any, atol: Any, keys: Any) -> Any:
    """One program for all matrices and tolerances."""
    return jax.vmap(lambda key: estimate_trace(matrix, key, atol=atol, max_matvecs=4000, batch=4))(keys)


@pytest.mark.slow
@pytest.mark.parametrize("oracle", [20, 50, 200])
@pytest.mark.parametrize("name", ["wishart", "decay", "laplacian", "indefinite", "step"])
def test_intervals_cover_the_trace_and_no_product_is_wasted(name: str, oracle: int) -> None:
    """1000 seeds; the oracle knows the variance of a sample, and so the number of products that it needs."""
    n = 64
    random = np.random.RandomState(2).randn(n, n)
    vectors = np.linalg.qr(random)[0]
    matrix = {
        "wishart": random @ random.T / n,
        "decay": (vectors * 0.9 ** np.arange(n)) @ vectors.T,
        "laplacian": 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1),
        "indefinite": (random + random.T) / n**0.5 + 3 * np.eye(n),
        "step": (vectors * np.where(np.arange(n) < n // 8, 1.0, 1e-3)) @ vectors.T,
    }[name]
    deviation = np.sqrt(2 * ((matrix**2).sum() - (np.diag(matrix) ** 2).sum()))
    got = run_with_each_key(matrix, deviation / oracle**0.5, jax.random.split(jax.random.key(7), 1000))
    covered = np.abs(np.asarray(got.value) - np.trace(matrix)) <= 1.96 * np.asarray(got.std_error)
    assert 0.9 <= covered.mean() <= 0.98
    assert np.asarray(got.num_matvecs).mean() <= 1.2 * oracle
    assert np.asarray(got.converged).all()
