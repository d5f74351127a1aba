"""Estimates have the mean and the error that they say, and intervals that hold; a tolerance ends them."""

import math
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from loopax._src.stochtrace.estimator import Moments, ends_in_errors, estimate_of, variance_of_mean
from loopax.stochtrace import Hutchinson, HutchPlusPlus, TraceEstimate, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import (
    ESTIMATORS,
    GENERAL,
    KEY,
    PSD,
    WITH_BASIS,
    compiled,
    each_estimator,
    each_estimator_two_fast,
    estimate,
    name_of,
    probes_of,
    with_eigenvalues,
)
from tests.support.limited_loops import raises
from tests.support.reference import assert_close

SAMPLES = np.random.RandomState(5).gamma(0.5, 2.0, 40)


def estimate_with(value: float = 2.0, std_error: float = 0.5, samples: int = 8, skewness: float = 0.0) -> TraceEstimate:
    numbers = (jnp.asarray(x) for x in (value, std_error, samples, True, samples, skewness))
    return TraceEstimate(*numbers)


def moments(samples: np.ndarray) -> Moments:
    return Moments.of(jnp.asarray(samples), jnp.ones(len(samples), bool))


def estimate_from(parts: list[Moments], count: int = 40) -> Any:
    return estimate_of(parts, jnp.asarray(count), variance_of_mean(parts, jnp.asarray(count)))


def test_without_skewness_an_interval_is_student_s() -> None:
    for level, samples in product((0.5, 0.95, 0.999), (2, 3, 8, 129, 130, 1000)):
        low, high = estimate_with(samples=samples).interval(level)
        assert_close((float(low), float(high)), scipy.stats.t.interval(level, samples - 1, 2.0, 0.5), 1e-6)


def test_the_ends_are_those_of_a_cubic_transformation() -> None:
    """Hall's g(t) = t + c t^2 / 3 + c^2 t^3 / 27 + c / 6 of both ends is Student's quantile."""
    for skewness in (-2.5, -1e-3, 0.0, 0.4, 2.8):
        below, above = ends_in_errors(0.95, jnp.asarray(9), jnp.asarray(skewness))
        t, c = np.array([below, -above]), skewness / 3
        quantile = scipy.stats.t.ppf(0.975, 8)
        assert_close(t + c * t**2 / 3 + c**2 * t**3 / 27 + c / 6, np.array([quantile, -quantile]), 1e-9)


def test_moments_and_skewness_are_those_of_the_samples() -> None:
    away, got = SAMPLES - SAMPLES.mean(), moments(SAMPLES)
    expected = (SAMPLES.mean(), (away**2).sum(), (away**3).sum() / (away**2).sum())
    assert_close(tuple(got), tuple(map(jnp.asarray, expected)))
    found = estimate_from([got])
    assert_close(found.skewness, scipy.stats.skew(SAMPLES, bias=False))
    assert_close(found.std_error, scipy.stats.sem(SAMPLES))
    for first in (0, 1, 17, 39):
        some = moments(SAMPLES[:first]) if first else Moments(*(jnp.zeros(()) for _ in range(3)))
        assert_close(some.merged(jnp.asarray(first), moments(SAMPLES[first:]), jnp.asarray(40 - first)), got)


@pytest.mark.parametrize("scale", [1e-14, 1e14])
def test_skewness_does_not_leave_the_range_of_float32(scale: float) -> None:
    """The cubes of such samples would."""
    samples = (scale * SAMPLES).astype(np.float32)
    halves = moments(samples[:20]), moments(samples[20:])
    for got in (moments(samples), halves[0].merged(jnp.asarray(20), halves[1], jnp.asarray(20))):
        skewness = estimate_from([got]).skewness
        np.testing.assert_allclose(skewness, scipy.stats.skew(SAMPLES, bias=False), rtol=1e-4)


def test_the_interval_of_a_complex_trace_is_one_for_its_real_part() -> None:
    matrix = np.asarray(PSD) + 1j * np.asarray(GENERAL + GENERAL.T)
    got = compiled(Hutchinson(), num_matvecs=20)(matrix)
    samples = np.asarray([compiled(Hutchinson(), num_matvecs=n)(matrix).value * n for n in range(1, 21)])
    samples = np.diff(samples, prepend=0)
    away = samples - samples.mean()
    assert_close(got.std_error, np.sqrt((np.abs(away) ** 2).sum() / (20 * 19)))
    skewness = (away.real**3).mean() / (np.abs(away) ** 2).mean() ** 1.5 * np.sqrt(20 * 19) / 18
    assert_close(got.skewness, skewness)
    low, high = got.interval()
    assert low.dtype == high.dtype == jnp.float64
    assert low < got.value.real < high


@each_estimator
def test_lanes_have_intervals_of_their_own_and_compiled_ones_too(estimator: Any) -> None:
    got = jax.jit(jax.vmap(lambda key: estimate(estimator, key=key)(PSD)))(jax.random.split(KEY, 3))
    low, high = jax.jit(lambda found: found.interval(0.9))(got)
    for lane in range(3):
        assert_close((low[lane], high[lane]), jax.tree.map(lambda x, lane=lane: x[lane], got).interval(0.9))
    single = compiled(estimator, num_matvecs=estimator.products_per_sample)(PSD)
    assert single.interval() == (-jnp.inf, jnp.inf)  # a single sample is an estimate, and says nothing about its error
    assert np.isfinite(single.value)
    assert (single.skewness, single.num_matvecs) == (0, estimator.products_per_sample)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("estimator", WITH_BASIS, ids=name_of)
def test_where_a_basis_sees_everything_the_interval_is_one_of_rounding_errors(estimator: Any, rank: int) -> None:
    matrix = np.asarray(with_eigenvalues(np.arange(1, rank + 1)), np.float32)
    count = 6 * estimator.products_per_sample
    run = jax.jit(jax.vmap(lambda key: estimate(estimator, key=key, num_matvecs=count)(matrix)))
    low, high = (np.asarray(end) for end in run(jax.random.split(KEY, 100)).interval())
    trace = np.trace(matrix.astype(float))
    assert ((low <= trace) & (high >= trace)).mean() > 0.9
    assert np.median(high - low) < 1e-4 * trace


def test_the_interval_of_equal_samples_is_one_of_rounding_errors() -> None:
    for seed in range(20):
        diagonal = np.random.RandomState(seed).rand(12).astype(np.float32)
        low, high = map(float, compiled(Hutchinson(), num_matvecs=11)(np.diag(diagonal)).interval())
        assert low <= diagonal.astype(float).sum() <= high
        assert high - low < 1e-5


def test_few_equal_samples_from_signs_say_nothing() -> None:
    """Ones on three coordinates: in 3/4 of cases the signs there disagree, and the sample is 1 in place of 3."""
    diagonal, ones = np.diag(np.arange(1.0, 13)).astype("f4"), np.zeros((12, 12), "f4")
    ones[:3, :3] = 1
    for count in (2, 10):
        few = compiled(Hutchinson(), num_matvecs=count)(diagonal)
        assert_close(np.asarray(few.value, float), 78.0, 1e-6)
        assert few.interval() == (-jnp.inf, jnp.inf)
    many = compiled(Hutchinson(), num_matvecs=11)(diagonal)
    assert many.std_error <= 1e-6 * many.value
    got = jax.jit(jax.vmap(lambda key: estimate_trace(ones, key, num_matvecs=4)))(jax.random.split(KEY, 400))
    low, high = got.interval()
    assert 0.2 < np.isinf(got.std_error).mean() < 0.45  # (3/4)^4 + (1/4)^4 = 0.32
    assert ((low <= 3) & (high >= 3)).mean() > 0.9
    of_ends = lambda matrix: jnp.stack(compiled(Hutchinson(), num_matvecs=4)(matrix).interval())
    assert jnp.isfinite(jax.jit(jax.jacrev(of_ends))(jnp.eye(12))).all()


def test_samples_beyond_the_range_of_their_squares_have_no_error_that_looks_certain() -> None:
    got = compiled(Hutchinson(), num_matvecs=6)(1e25 * np.asarray(PSD, np.float32))
    assert not np.isfinite(got.std_error)
    assert not np.isfinite(got.interval()).any()


def test_a_level_that_is_none() -> None:
    level: Any
    for level, error in ((1.0, ValueError), (0.0, ValueError), ("95%", TypeError)):
        with raises(error, "TraceEstimate.interval(level=...)"):
            estimate_with().interval(level)


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
