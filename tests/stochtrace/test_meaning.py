"""Estimates are those of the papers, from the same probes, however they are evaluated: in batches, lanes, eagerly."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.stochtrace.operators import draw
from loopax.stochtrace import Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import (
    ESTIMATORS,
    GENERAL,
    KEY,
    PSD,
    N,
    compiled,
    each_estimator,
    estimate,
    fast_and_slow,
    probes_of,
)
from tests.support.reference import assert_close

PROBES = ["rademacher", "sphere"]
GENERAL_MATRIX, PSD_MATRIX = np.asarray(GENERAL), np.asarray(PSD)


@pytest.mark.parametrize("probes", PROBES)
def test_hutchinson_is_the_mean_of_quadratic_forms(probes: Any) -> None:
    w = probes_of(probes, 5)
    samples = (w * (GENERAL_MATRIX @ w)).sum(0)
    got = compiled(Hutchinson(probes), num_matvecs=5)(GENERAL)
    assert_close(got.value, samples.mean())
    assert_close(got.std_error, samples.std(ddof=1) / 5**0.5)
    assert got.num_matvecs == 5
    assert got.converged


def test_hutchplusplus_is_the_trace_on_a_basis_and_the_mean_of_the_rest() -> None:
    columns = 4
    q = np.linalg.qr(GENERAL_MATRIX @ probes_of("rademacher", columns))[0]
    numbers = -1 - np.arange(columns, dtype=np.int32)
    others = np.asarray(jax.jit(lambda numbers: draw("rademacher", KEY, numbers, N, jnp.float64))(numbers)).T
    rest = others - q @ (q.T @ others)
    samples = np.trace(q.T @ GENERAL_MATRIX @ q) + (rest * (GENERAL_MATRIX @ rest)).sum(0)
    got = compiled(HutchPlusPlus(), num_matvecs=12)(GENERAL)
    assert_close(got.value, samples.mean())
    assert_close(got.std_error, samples.std(ddof=1) / columns**0.5)


def mean_and_error(sample: Any, probes: np.ndarray) -> tuple[np.float64, np.float64]:
    """The mean of samples of one probe and all others, and its error: from their spread, covariance and jackknife."""
    m = probes.shape[1]
    samples_of = lambda w: np.array([sample(w[:, i], np.delete(w, i, axis=1)) for i in range(w.shape[1])])
    samples = samples_of(probes)
    changes = np.zeros((m, m))  # [i, j]: what the probe j changes in the sample i
    for j in range(m):
        others = np.arange(m) != j
        changes[others, j] = samples[others] - samples_of(probes[:, others])
    spread, covariance = samples.var(ddof=1) / m, (changes * changes.T).sum() / (m * (m - 1))
    without = (samples.sum() - samples - changes.sum(0)) / (m - 1)
    jackknife = (m - 1) / m * ((without - without.mean()) ** 2).sum()
    return samples.mean(), max(spread + max(covariance, 0), 0.5 * (spread * jackknife) ** 0.5) ** 0.5


def scaled(probes: str, rest: np.ndarray, m: int) -> Any:
    """How much longer a part of one of m probes is on average."""
    return 1.0 if probes == "rademacher" else (N - m + 1) / (rest @ rest)


@pytest.mark.parametrize("probes", PROBES)
def test_xtrace_leaves_out_one_probe_after_the_other(probes: Any) -> None:
    """From some of the probes that there is room for, and from all."""

    def sample(x: Any, others: Any) -> Any:
        q = np.linalg.qr(GENERAL_MATRIX @ others)[0]
        rest = x - q @ (q.T @ x)
        of_rest = scaled(probes, rest, others.shape[1] + 1) * (rest @ GENERAL_MATRIX @ rest)
        return np.trace(q.T @ GENERAL_MATRIX @ q) + of_rest

    for columns in (4, 7):
        value, error = mean_and_error(sample, probes_of(probes, columns))
        got = compiled(XTrace(probes), max_matvecs=14)(GENERAL, num_matvecs=2 * columns)
        assert_close(got.value, value)
        assert_close(got.std_error, error, 1e-8)


@pytest.mark.parametrize("probes", PROBES)
def test_xnystrace_leaves_out_one_probe_after_the_other(probes: Any) -> None:
    """From some of the probes that there is room for, and from all; also of what is negative."""

    def sample(x: Any, others: Any) -> Any:
        images, q = PSD_MATRIX @ others, np.linalg.qr(others)[0]
        nystroem = images @ np.linalg.solve(others.T @ images, images.T)
        of_rest = scaled(probes, x - q @ (q.T @ x), others.shape[1] + 1) * (x @ (PSD_MATRIX - nystroem) @ x)
        return np.trace(nystroem) + of_rest

    run = compiled(XNysTrace(probes, positive_semidefinite=True), max_matvecs=9)
    for columns in (5, 9):
        value, error = mean_and_error(sample, probes_of(probes, columns))
        for sign in (1, -1):
            got = run(sign * PSD_MATRIX, num_matvecs=columns)
            assert_close(got.value, sign * value)
            assert_close(got.std_error, error, 1e-8)


def stacked(results: Any) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *results)


@fast_and_slow(ESTIMATORS[:2], ESTIMATORS[2:])
def test_batches_and_bounds_do_not_change_an_estimate(estimator: Any) -> None:
    """Of five samples: in uneven batches, in a single one, and where there is room for more."""
    per_sample = estimator.products_per_sample
    alone = compiled(estimator, num_matvecs=5 * per_sample)(PSD)
    for options in ({"batch": 2}, {"batch": 64}, {"max_matvecs": 9 * per_sample - 1}):
        assert_close(compiled(estimator, num_matvecs=5 * per_sample, **options)(PSD), alone)
    bounded = compiled(estimator, max_matvecs=9 * per_sample, batch=3)
    assert_close(bounded(PSD, num_matvecs=5 * per_sample), alone)


@each_estimator
def test_the_number_of_products_is_that_of_whole_samples(estimator: Any) -> None:
    seen = []

    def matvec(v: Any) -> Any:
        jax.debug.callback(lambda _: seen.append(1), v[0])  # for every lane of a batch
        return PSD @ v

    run = jax.jit(lambda n: estimate_trace(matvec, KEY, estimator=estimator, num_matvecs=n, max_matvecs=9, size=N))
    for num_matvecs in (3, 7):
        got = jax.block_until_ready(run(num_matvecs))
        jax.effects_barrier()
        assert got.num_matvecs == num_matvecs // estimator.products_per_sample * estimator.products_per_sample
        assert len(seen) == got.num_matvecs
        seen.clear()


@fast_and_slow(ESTIMATORS[:2], ESTIMATORS[3:])
def test_lanes_have_counts_tolerances_operators_and_keys_of_their_own(estimator: Any) -> None:
    counts, scales, keys = np.array([3, 11, 6]), np.arange(1.0, 4.0), jax.random.split(KEY, 3)
    bounded = compiled(estimator, max_matvecs=N)
    of_count = lambda n, scale, key: bounded(scale * PSD, num_matvecs=n, key=key)
    alone = [of_count(*lane) for lane in zip(counts, scales, keys, strict=True)]
    assert_close(jax.jit(jax.vmap(of_count))(counts, scales, keys), stacked(alone))
    tolerances, until = np.array([10.0, 1e-3, 0.1]), compiled(estimator, max_matvecs=10 * estimator.products_per_sample)
    got = jax.jit(jax.vmap(lambda rtol: until(PSD, rtol=rtol)))(tolerances)
    assert_close(got, stacked([until(PSD, rtol=rtol) for rtol in tolerances]))


@fast_and_slow(ESTIMATORS[:2], ESTIMATORS[3:])
def test_eagerly_as_compiled(estimator: Any) -> None:
    result = compiled(estimator)(PSD)
    assert_close(estimate(estimator, key=jax.random.PRNGKey(0))(PSD), result)
    types = lambda found: jax.tree.map(lambda x: (x.shape, x.dtype), found)
    assert types(eqx.filter_eval_shape(estimate(estimator), PSD)) == types(result)
    if estimator is ESTIMATORS[0]:
        with jax.disable_jit():
            assert_close(estimate(estimator)(PSD), result)
