"""Estimates are those of the papers and of the peers, from the same probes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.stochtrace.operators import draw
from loopax.stochtrace import Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import GENERAL, KEY, PSD, N, compiled, name_of, probes_of
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


def mean_and_error(samples_of: Any, probes: np.ndarray) -> tuple[np.float64, np.float64]:
    """The mean of samples that share a basis, and its standard error: from their spread, covariance and jackknife."""
    m = probes.shape[1]
    samples = np.asarray(samples_of(probes))
    changes = np.zeros((m, m))  # [i, j]: what the probe j changes in the sample i
    for j in range(m):
        others = np.arange(m) != j
        changes[others, j] = samples[others] - np.asarray(samples_of(probes[:, others]))
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

    def samples_of(w: Any) -> Any:
        samples = []
        for i in range(w.shape[1]):
            q = np.linalg.qr(GENERAL_MATRIX @ np.delete(w, i, axis=1))[0]
            rest = w[:, i] - q @ (q.T @ w[:, i])
            of_rest = scaled(probes, rest, w.shape[1]) * (rest @ GENERAL_MATRIX @ rest)
            samples.append(np.trace(q.T @ GENERAL_MATRIX @ q) + of_rest)
        return samples

    for columns in (4, 7):
        value, error = mean_and_error(samples_of, probes_of(probes, columns))
        got = compiled(XTrace(probes), max_matvecs=14)(GENERAL, num_matvecs=2 * columns)
        assert_close(got.value, value)
        assert_close(got.std_error, error, 1e-8)


@pytest.mark.parametrize("probes", PROBES)
def test_xnystrace_leaves_out_one_probe_after_the_other(probes: Any) -> None:
    """From some of the probes that there is room for, and from all; also of what is negative."""

    def samples_of(w: Any) -> Any:
        samples = []
        for i in range(w.shape[1]):
            x, others = w[:, i], np.delete(w, i, axis=1)
            images = PSD_MATRIX @ others
            nystroem = images @ np.linalg.solve(others.T @ images, images.T)
            q = np.linalg.qr(others)[0]
            of_rest = scaled(probes, x - q @ (q.T @ x), w.shape[1]) * (x @ (PSD_MATRIX - nystroem) @ x)
            samples.append(np.trace(nystroem) + of_rest)
        return samples

    run = compiled(XNysTrace(probes, positive_semidefinite=True), max_matvecs=9)
    for columns in (5, 9):
        value, error = mean_and_error(samples_of, probes_of(probes, columns))
        for sign in (1, -1):
            got = run(sign * PSD_MATRIX, num_matvecs=columns)
            assert_close(got.value, sign * value)
            assert_close(got.std_error, error, 1e-8)


# ---- against the peers, on the same probes


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [Hutchinson("sphere"), XTrace(), XNysTrace()], ids=name_of)
def test_the_value_is_traceax_s(estimator: Any) -> None:
    lineax, traceax = pytest.importorskip("lineax"), pytest.importorskip("traceax")

    class Ours(traceax.SphereSampler):
        def __call__(self, key: Any, n: int, k: int) -> Any:
            return jnp.asarray(probes_of("sphere", k, n))

    operator = lineax.MatrixLinearOperator(PSD, lineax.positive_semidefinite_tag)
    peer = getattr(traceax, type(estimator).__name__ + "Estimator")(Ours())
    run = jax.jit(lambda n: estimate_trace(operator, KEY, estimator=estimator, num_matvecs=n, max_matvecs=10).value)
    for num_matvecs in (2, 6, 10):
        probes_of("sphere", num_matvecs)  # drawn before the peer's program is traced
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            value = jax.jit(lambda n=num_matvecs: peer.estimate(KEY, operator, n)[0])()
        assert_close(run(num_matvecs), value, 1e-8)
