"""Confidence intervals: Student's quantiles, the correction for skewness, and what is said where nothing is known."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from loopax._src.stochtrace.estimator import Moments, ends_in_errors, estimate_of, variance_of_mean
from loopax.stochtrace import Hutchinson, TraceEstimate, XNysTrace, estimate_trace
from tests.stochtrace.cases import (
    GENERAL,
    KEY,
    PSD,
    WITH_BASIS,
    compiled,
    each_estimator,
    estimate,
    name_of,
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
    assert single.interval() == (-jnp.inf, jnp.inf)
    assert single.skewness == 0


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


# ---- where nothing is known


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


def test_equal_samples_that_are_not_of_signs_say_what_they_seem_to() -> None:
    identity, psd = np.eye(12), XNysTrace(positive_semidefinite=True)
    for estimator, matrix in ((Hutchinson("sphere"), identity), (Hutchinson(), identity + 0j), (psd, identity)):
        assert compiled(estimator, num_matvecs=4)(matrix).std_error < 1e-12
    assert compiled(Hutchinson(), num_matvecs=4)(np.full((1, 1), 3.0)).std_error < 1e-12


def test_samples_beyond_the_range_of_their_squares_have_no_error_that_looks_certain() -> None:
    got = compiled(Hutchinson(), num_matvecs=6)(1e25 * np.asarray(PSD, np.float32))
    assert not np.isfinite(got.std_error)
    assert not np.isfinite(got.interval()).any()


# ---- what is no level


LEVELS: Any = [
    (1.0, ValueError, "got 1.0, expected a probability between 0 and 1, such as 0.95."),
    (0.0, ValueError, "got 0.0, expected a positive number."),
    ("95%", TypeError, "expected a Python float."),
]


@pytest.mark.parametrize(("level", "error", "text"), LEVELS)
def test_a_level_that_is_none(level: Any, error: type[Exception], text: str) -> None:
    with raises(error, "TraceEstimate.interval(level=...)", text):
        estimate_with().interval(level)
    with raises(TypeError, "TraceEstimate.interval(level=...)"):
        jax.jit(lambda level: estimate_with().interval(level))(0.9)
