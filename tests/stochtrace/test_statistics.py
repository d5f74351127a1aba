"""Estimates have the mean and the error that they say; a tolerance ends them as soon as it is met."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from loopax._src.stochtrace.estimator import ends_in_errors
from loopax.stochtrace import Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import (
    ESTIMATORS,
    GENERAL,
    KEY,
    PSD,
    compiled,
    each_estimator_two_fast,
    estimate,
    name_of,
    probes_of,
)
from tests.support.reference import assert_close


def test_a_tolerance_ends_an_estimate_at_the_first_look_that_allows_it() -> None:
    """Looks are a tenth apart; half of the interval is what has to be short enough, and it is what is reported."""
    samples = probes_of("rademacher", 200)
    samples = (samples * (np.asarray(GENERAL) @ samples)).sum(0)
    got = compiled(Hutchinson(), rtol=0.1, atol=1.0, max_matvecs=200)(GENERAL)
    looks, n = [16], int(got.num_matvecs)
    while looks[-1] < n:
        looks.append(math.ceil(1.1 * looks[-1]))
    assert 16 < n < 200
    assert got.converged
    halves, errors = zip(*(half_and_error(samples[:count]) for count in looks), strict=True)
    allowed = [1.0 + 0.1 * abs(samples[:count].mean()) for count in looks]
    assert [half <= bound for half, bound in zip(halves, allowed, strict=True)] == [count == n for count in looks]
    assert_close(got.std_error, np.clip(allowed[-1] / halves[-1], 1, 1.5) * errors[-1], 1e-8)
    low, high = got.interval()
    assert_close((high - low) / 2, scipy.stats.norm.ppf(0.975) * (1.0 + 0.1 * abs(got.value)), 1e-8)


def half_and_error(samples: np.ndarray) -> tuple[float, float]:
    """Half of the interval, in units of a normal one's, and the standard error."""
    error, skewness = samples.std(ddof=1) / len(samples) ** 0.5, scipy.stats.skew(samples, bias=False)
    below, above = ends_in_errors(0.95, jnp.asarray(len(samples)), jnp.asarray(skewness))
    return float((below + above) / 2 / scipy.stats.norm.ppf(0.975) * error), float(error)


def test_an_error_far_below_the_tolerance_is_not_raised_to_it() -> None:
    exact = compiled(Hutchinson(), num_matvecs=16)(PSD)
    assert_close(compiled(Hutchinson(), max_matvecs=20)(PSD, atol=1e9).std_error, 1.5 * exact.std_error)


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
    if probes != "rademacher" or estimator_class in (Hutchinson, HutchPlusPlus):
        assert_close((errors**2).mean() / values.var(), 1.0, 0.15)


# ---- intervals

SEEDS = 1000
SIZE = 64


def least_coverage(seeds: int) -> float:
    """What a coverage of 92 % may look like with so many seeds: the lower end of a 99.9 % interval."""
    return float(scipy.stats.binom.ppf(0.0005, seeds, 0.92)) / seeds


def covered(got: Any, trace: float) -> float:
    low, high = got.interval()
    return float(np.mean((np.asarray(low) <= trace) & (np.asarray(high) >= trace)))


def matrix_of_size(name: str) -> np.ndarray:
    random, i = np.random.RandomState(2).randn(SIZE, SIZE), np.arange(SIZE)
    vectors = np.linalg.qr(random)[0]
    return {
        "wishart": random @ random.T / SIZE,
        "decay": (vectors * 0.7**i) @ vectors.T,
        "laplacian": 2 * np.eye(SIZE) - np.eye(SIZE, k=1) - np.eye(SIZE, k=-1),
        "indefinite": (random + random.T) / SIZE**0.5 + 3 * np.eye(SIZE),
        "step": (vectors * np.where(i < SIZE // 8, 1.0, 1e-3)) @ vectors.T,
        "rank one": np.outer(vectors[0], vectors[0]),
    }[name]


@jax.jit
def run_with_each_key(matrix: Any, atol: Any, keys: Any) -> Any:
    """One program for all matrices and tolerances."""
    return jax.vmap(lambda key: estimate_trace(matrix, key, atol=atol, max_matvecs=4000, batch=4))(keys)


@pytest.mark.slow
@pytest.mark.parametrize("oracle", [20, 36, 72, 200])
@pytest.mark.parametrize("name", ["wishart", "decay", "laplacian", "indefinite", "step", "rank one"])
def test_intervals_cover_the_trace_and_no_product_is_wasted(name: str, oracle: int) -> None:
    """The oracle knows the variance of a sample, and so the number of products that it needs."""
    matrix = matrix_of_size(name)
    deviation = np.sqrt(2 * ((matrix**2).sum() - (np.diag(matrix) ** 2).sum()))
    got = run_with_each_key(matrix, deviation / oracle**0.5, jax.random.split(jax.random.key(7), SEEDS))
    assert covered(got, np.trace(matrix)) >= least_coverage(SEEDS)
    assert np.asarray(got.num_matvecs).mean() <= oracle * (1.6 if oracle <= 36 else 1.2)
    assert np.asarray(got.converged).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wishart", "decay", "laplacian", "step"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=name_of)
def test_intervals_of_a_number_of_products_cover_the_trace(estimator: Any, name: str) -> None:
    matrix, keys = matrix_of_size(name), jax.random.split(jax.random.key(8), SEEDS)
    bounded = compiled(estimator, max_matvecs=36)
    run = jax.jit(lambda matrix, n: jax.lax.map(lambda key: bounded(matrix, num_matvecs=n, key=key), keys))
    for count in (18, 36):
        assert covered(run(matrix, count), np.trace(matrix)) >= least_coverage(SEEDS)
