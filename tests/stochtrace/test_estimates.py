"""Estimates are those of the papers, of the peers and of a loop in Python, however they are evaluated."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.stochtrace.probes import draw
from loopax.stochtrace import Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace
from tests.stochtrace.cases import (
    ESTIMATORS,
    GENERAL,
    KEY,
    PSD,
    TWO_ESTIMATORS,
    WITH_BASIS,
    N,
    estimate,
    name_of,
    with_eigenvalues,
)
from tests.support.reference import assert_close

PROBES = ["rademacher", "normal", "sphere"]
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=name_of)
two_estimators = pytest.mark.parametrize("estimator", TWO_ESTIMATORS, ids=name_of)


def probes_of(name: Any, count: int, size: int = N) -> jax.Array:
    """What an estimate with `KEY` draws, a column for each."""
    return draw(name, KEY, jnp.arange(count, dtype=jnp.int32), size, jnp.float64).T


# ---- against the meaning


@pytest.mark.parametrize("probes", PROBES)
def test_hutchinson_is_the_mean_of_quadratic_forms(probes: Any) -> None:
    w = probes_of(probes, 5)
    samples = np.asarray((w * (GENERAL @ w)).sum(0))
    got = estimate(Hutchinson(probes), num_matvecs=5)(GENERAL)
    assert_close(got.value, jnp.asarray(samples.mean()))
    assert_close(got.std_error, jnp.asarray(samples.std(ddof=1) / 5**0.5))
    assert got.num_matvecs == 5
    assert got.converged


def test_hutchplusplus_is_the_trace_on_a_basis_and_the_mean_of_the_rest() -> None:
    columns = 4
    q = jnp.linalg.qr(GENERAL @ probes_of("rademacher", columns))[0]
    others = draw("rademacher", KEY, -1 - jnp.arange(columns, dtype=jnp.int32), N, jnp.float64).T
    rest = others - q @ (q.T @ others)
    samples = np.asarray(jnp.trace(q.T @ GENERAL @ q) + (rest * (GENERAL @ rest)).sum(0))
    got = estimate(HutchPlusPlus(), num_matvecs=12)(GENERAL)
    assert_close(got.value, jnp.asarray(samples.mean()))
    assert_close(got.std_error, jnp.asarray(samples.std(ddof=1) / columns**0.5))


def mean_and_error(samples_of: Any, probes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean of samples that share a basis, and what their spread and the jackknife say of its error."""
    m = probes.shape[1]
    samples = np.asarray(samples_of(probes))
    without = np.asarray([np.mean(samples_of(jnp.delete(probes, j, axis=1))) for j in range(m)])
    variances = samples.var(ddof=1) / m, (m - 1) / m * ((without - without.mean()) ** 2).sum()
    return jnp.asarray(samples.mean()), jnp.asarray(np.prod(variances) ** 0.25)


def scaled(probes: str, rest: jax.Array, m: int) -> Any:
    """How much longer a part of one of m probes is on average."""
    return 1.0 if probes == "rademacher" else (N - m + 1) / (rest @ rest)


@pytest.mark.parametrize("probes", PROBES)
def test_xtrace_leaves_out_one_probe_after_the_other(probes: Any) -> None:
    def samples_of(w: Any) -> Any:
        samples = []
        for i in range(w.shape[1]):
            q = jnp.linalg.qr(GENERAL @ jnp.delete(w, i, axis=1))[0]
            rest = w[:, i] - q @ (q.T @ w[:, i])
            of_rest = scaled(probes, rest, w.shape[1]) * (rest @ GENERAL @ rest)
            samples.append(jnp.trace(q.T @ GENERAL @ q) + of_rest)
        return samples

    value, error = mean_and_error(samples_of, probes_of(probes, 4))
    got = estimate(XTrace(probes), num_matvecs=8)(GENERAL)
    assert_close(got.value, value)
    assert_close(got.std_error, error, 1e-8)
    assert_close(estimate(XTrace(probes), num_matvecs=8, max_matvecs=14)(GENERAL).std_error, error, 1e-8)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("probes", PROBES)
def test_xnystrace_leaves_out_one_probe_after_the_other(probes: Any, sign: int) -> None:
    def samples_of(w: Any) -> Any:
        samples = []
        for i in range(w.shape[1]):
            x, others = w[:, i], jnp.delete(w, i, axis=1)
            nystroem = PSD @ others @ jnp.linalg.solve(others.T @ PSD @ others, others.T @ PSD)
            q = jnp.linalg.qr(others)[0]
            of_rest = scaled(probes, x - q @ (q.T @ x), w.shape[1]) * (x @ (PSD - nystroem) @ x)
            samples.append(jnp.trace(nystroem) + of_rest)
        return samples

    value, error = mean_and_error(samples_of, probes_of(probes, 5))
    estimator = XNysTrace(probes, positive_semidefinite=True)
    got = estimate(estimator, num_matvecs=5)(sign * PSD)
    assert_close(got.value, sign * value)
    assert_close(got.std_error, error, 1e-8)
    assert_close(estimate(estimator, num_matvecs=5, max_matvecs=9)(sign * PSD).std_error, error, 1e-8)


# ---- against the peers, on the same probes


def peer_sampler(traceax: Any) -> Any:
    class Ours(traceax.SphereSampler):
        def __call__(self, key: Any, n: int, k: int) -> Any:
            return probes_of("sphere", k, n)

    return Ours()


@pytest.mark.parametrize("num_matvecs", [2, 6, 10])
@pytest.mark.parametrize("estimator", [Hutchinson("sphere"), XTrace(), XNysTrace()], ids=name_of)
def test_the_value_is_traceax_s(estimator: Any, num_matvecs: int) -> None:
    lineax, traceax = pytest.importorskip("lineax"), pytest.importorskip("traceax")
    name = type(estimator).__name__ + "Estimator"
    operator = lineax.MatrixLinearOperator(PSD, lineax.positive_semidefinite_tag)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        value, _ = getattr(traceax, name)(peer_sampler(traceax)).estimate(KEY, operator, num_matvecs)
    assert_close(estimate_trace(operator, KEY, estimator=estimator, num_matvecs=num_matvecs).value, value, 1e-8)


@pytest.mark.parametrize(
    ("estimator", "leave_one_out"), [(XTrace(), "xtrace"), (XNysTrace(positive_semidefinite=True), "xnystrace")]
)
def test_the_value_is_matfree_s(estimator: Any, leave_one_out: str) -> None:
    peer = pytest.importorskip("matfree.stochtrace")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        samples = getattr(peer, f"leave_one_out_{leave_one_out}")()(lambda v: PSD @ v, probes_of("sphere", 5).T)
    matvecs = 5 * estimator.products_per_sample
    assert_close(estimate(estimator, num_matvecs=matvecs)(PSD).value, samples.mean(), 1e-8)


# ---- the same, however it is evaluated


@each_estimator
def test_batches_and_bounds_do_not_change_an_estimate(estimator: Any) -> None:
    alone = estimate(estimator)(PSD)
    for options in ({"batch": 2}, {"batch": 4}, {"batch": 64}, {"max_matvecs": 11}, {"max_matvecs": 12, "batch": 3}):
        assert_close(estimate(estimator, **options)(PSD), alone)


@each_estimator
def test_the_number_of_products_is_that_of_whole_samples(estimator: Any) -> None:
    seen = []

    def matvec(v: Any) -> Any:
        jax.debug.callback(lambda _: seen.append(1), v[0])  # for every lane of a batch
        return PSD @ v

    for num_matvecs in (3, 7):
        got = jax.block_until_ready(estimate_trace(matvec, KEY, estimator=estimator, num_matvecs=num_matvecs, size=N))
        jax.effects_barrier()
        assert got.num_matvecs == num_matvecs // estimator.products_per_sample * estimator.products_per_sample
        assert len(seen) == got.num_matvecs
        seen.clear()


@two_estimators
def test_one_compilation_for_ten_counts(estimator: Any) -> None:
    traces = []

    @jax.jit
    def run(n: Any) -> Any:
        traces.append(n)
        return estimate(estimator, num_matvecs=n, max_matvecs=N)(PSD)

    for n in range(2 + (estimator.products_per_sample > 2), 12):  # with all 12 the error is rounding
        assert_close(run(n), estimate(estimator, num_matvecs=n)(PSD))
    assert len(traces) == 1


@each_estimator
def test_lanes_have_counts_and_tolerances_of_their_own(estimator: Any) -> None:
    counts, tolerances = jnp.array([3, 11, 6]), jnp.array([10.0, 1e-3, 0.1])
    got = jax.vmap(lambda n: estimate(estimator, num_matvecs=n, max_matvecs=N)(PSD))(counts)
    alone = [estimate(estimator, num_matvecs=int(n))(PSD) for n in counts]
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *alone))
    many = {"max_matvecs": 10 * estimator.products_per_sample}
    got = jax.vmap(lambda rtol: estimate(estimator, rtol=rtol, **many)(PSD))(tolerances)
    alone = [estimate(estimator, rtol=rtol, **many)(PSD) for rtol in tolerances]
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *alone))


@each_estimator
def test_lanes_have_operators_and_keys_of_their_own(estimator: Any) -> None:
    keys, scales = jax.random.split(jax.random.key(1), 3), jnp.arange(1.0, 4.0)
    run = jax.jit(lambda scale, key: estimate(estimator, key=key)(scale * PSD))
    alone = [run(scale, key) for scale, key in zip(scales, keys, strict=True)]
    assert_close(jax.jit(jax.vmap(run))(scales, keys), jax.tree.map(lambda *x: jnp.stack(x), *alone))


@two_estimators
def test_eagerly_as_compiled(estimator: Any) -> None:
    compiled = jax.jit(estimate(estimator))(PSD)
    with jax.disable_jit():
        assert_close(estimate(estimator)(PSD), compiled)
    assert_close(estimate(estimator, key=jax.random.PRNGKey(0))(PSD), compiled)
    shapes = eqx.filter_eval_shape(estimate(estimator), PSD)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), compiled)


@each_estimator
def test_in_the_body_of_a_loop(estimator: Any) -> None:
    def body(i: Any, total: Any) -> Any:
        return total + estimate(estimator, key=jax.random.fold_in(KEY, i), num_matvecs=3 + i, max_matvecs=N)(PSD).value

    alone = [estimate(estimator, key=jax.random.fold_in(KEY, i), num_matvecs=3 + i)(PSD).value for i in range(3)]
    assert_close(jax.jit(lambda: lx.fori_loop(0, 3, body, 0.0))(), sum(alone))


# ---- edges


@each_estimator
def test_the_least_number_of_products(estimator: Any) -> None:
    """A single sample is an estimate, and says nothing about its error."""
    got = estimate(estimator, num_matvecs=estimator.products_per_sample)(PSD)
    assert jnp.isfinite(got.value)
    assert jnp.isinf(got.std_error)
    assert got.num_matvecs == estimator.products_per_sample


@each_estimator
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.complex128])
def test_an_operator_of_one_element(estimator: Any, dtype: Any) -> None:
    got = estimate(estimator, num_matvecs=estimator.products_per_sample)(jnp.full((1, 1), 3, dtype))
    assert got.value.dtype == dtype
    assert_close(got.value.real.astype(float), jnp.asarray(3.0), 1e-6)


@pytest.mark.parametrize("estimator", WITH_BASIS, ids=name_of)
@pytest.mark.parametrize("batch", [1, 5, 12])
def test_a_basis_of_the_whole_space_gives_the_trace(estimator: Any, batch: int) -> None:
    matrix = PSD if isinstance(estimator, XNysTrace) else GENERAL
    got = estimate(estimator, num_matvecs=N * estimator.products_per_sample, batch=batch)(matrix)
    assert_close(got.value, jnp.trace(matrix), 1e-8)


@pytest.mark.parametrize("batch", [1, 3, 12])
@pytest.mark.parametrize("estimator", WITH_BASIS, ids=name_of)
@pytest.mark.parametrize("eigenvalues", [[], [1.0], [3.0, 2.0, 1e-9], [1.0] * 12, [1e-100] * 4, [1e100, 1.0]], ids=str)
def test_low_ranks(estimator: Any, eigenvalues: list[float], batch: int) -> None:
    """Exact and finite where there are more samples than eigenvalues; every probe sees all of a multiple of I."""
    got = estimate(estimator, num_matvecs=8 * estimator.products_per_sample, batch=batch)(with_eigenvalues(eigenvalues))
    scale = sum(eigenvalues) or 1.0
    if isinstance(estimator, HutchPlusPlus) and len(eigenvalues) == N:  # signs do not see that it is a multiple of I
        assert got.std_error > 0
        assert abs(got.value - scale) < 4 * got.std_error
        return
    assert_close(got.value / scale, jnp.asarray(sum(eigenvalues) / scale), 1e-8)
    assert got.std_error / scale < 1e-8


def test_probes_that_are_each_other_s_negative() -> None:
    """Signs of few elements repeat themselves, and a basis of their images has fewer directions than probes."""
    matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    keys = jax.random.split(KEY, 50)
    for estimator in (XTrace("rademacher"), XNysTrace("rademacher", positive_semidefinite=True)):
        matvecs = 2 * estimator.products_per_sample
        got = jax.vmap(lambda key, e=estimator, k=matvecs: estimate(e, key=key, num_matvecs=k)(matrix))(keys)
        assert jnp.isfinite(got.value).all()
        assert jnp.isfinite(got.std_error).all()


@pytest.mark.parametrize("estimator", WITH_BASIS, ids=name_of)
def test_a_basis_stays_orthonormal_beyond_the_rank(estimator: Any) -> None:
    """Directions that rounding errors decide are as orthogonal as others; float32 has more of them."""
    matrix = with_eigenvalues([1.0, 0.5]).astype(jnp.float32)
    got = estimate(estimator, num_matvecs=10 * estimator.products_per_sample)(matrix)
    assert_close(got.value.astype(float), jnp.asarray(1.5), 1e-5)


# ---- statistics


@pytest.mark.slow
@pytest.mark.parametrize("probes", PROBES)
@pytest.mark.parametrize("estimator_class", [Hutchinson, HutchPlusPlus, XTrace, XNysTrace])
def test_the_mean_over_keys_is_the_trace(estimator_class: Any, probes: Any) -> None:
    declared = {"positive_semidefinite": True} if estimator_class is XNysTrace else {}
    estimator = estimator_class(probes, **declared)
    keys = jax.random.split(jax.random.key(3), 4000)
    got = jax.jit(jax.vmap(lambda key: estimate(estimator, key=key, num_matvecs=8)(PSD)))(keys)
    error = got.value.mean() - jnp.trace(PSD)
    assert abs(error) < 4 * got.value.std() / len(keys) ** 0.5
    if estimator_class in (Hutchinson, HutchPlusPlus):  # whose samples are independent
        assert_close((got.std_error**2).mean() / got.value.var(), jnp.ones(()), 0.15)


def test_complex_signs_vary_half_as_much_as_real_ones() -> None:
    matrix = jax.lax.complex(PSD, GENERAL - GENERAL.T)
    matrix = matrix + matrix.conj().T
    keys = jax.random.split(KEY, 2000)
    got = jax.jit(jax.vmap(lambda key: estimate(Hutchinson(), key=key, num_matvecs=1)(matrix).value))(keys)
    off_diagonal = (jnp.abs(matrix) ** 2).sum() - (jnp.abs(jnp.diag(matrix)) ** 2).sum()
    assert_close(got.var() / off_diagonal, jnp.ones(()), 0.15)  # and 2 for signs
    assert abs(got.mean() - jnp.trace(matrix)) < 4 * jnp.sqrt(off_diagonal / len(keys))


def test_a_tolerance_ends_an_estimate_as_soon_as_it_is_met() -> None:
    samples = probes_of("rademacher", 200)
    samples = np.asarray((samples * (GENERAL @ samples)).sum(0))
    got = estimate(Hutchinson(), rtol=0.1, atol=1.0, max_matvecs=200)(GENERAL)
    n = int(got.num_matvecs)
    assert 16 < n < 200
    assert got.converged
    for count in range(16, n + 1):
        mean, error = samples[:count].mean(), samples[:count].std(ddof=1) / count**0.5
        assert (error <= 1.0 + 0.1 * abs(mean)) == (count == n)


@each_estimator
def test_a_tolerance_is_not_asked_before_sixteen_products_and_not_after_the_last(estimator: Any) -> None:
    samples = -(-16 // estimator.products_per_sample)
    matrix = jnp.eye(20) + jnp.pad(PSD, (0, 8))
    soon = estimate(estimator, atol=1e9, max_matvecs=20 * estimator.products_per_sample)(matrix)
    assert soon.num_matvecs == samples * estimator.products_per_sample
    assert soon.converged
    never = estimate(estimator, atol=0.0, max_matvecs=3 * estimator.products_per_sample)(PSD)
    assert never.num_matvecs == 3 * estimator.products_per_sample
    assert not never.converged


@pytest.mark.slow
@pytest.mark.parametrize("oracle", [20, 50, 200])
@pytest.mark.parametrize("name", ["wishart", "decay", "laplacian", "indefinite", "step"])
def test_intervals_cover_the_trace_and_no_product_is_wasted(name: str, oracle: int) -> None:
    """1000 seeds; the oracle knows the variance of a sample, and so the number of products that it needs."""
    n = 64
    random = jnp.asarray(np.random.RandomState(2).randn(n, n))
    vectors = jnp.linalg.qr(random)[0]
    matrix = {
        "wishart": random @ random.T / n,
        "decay": (vectors * 0.9 ** jnp.arange(float(n))[None]) @ vectors.T,
        "laplacian": 2 * jnp.eye(n) - jnp.eye(n, k=1) - jnp.eye(n, k=-1),
        "indefinite": (random + random.T) / n**0.5 + 3 * jnp.eye(n),
        "step": (vectors * jnp.where(jnp.arange(n) < n // 8, 1.0, 1e-3)[None]) @ vectors.T,
    }[name]
    deviation = jnp.sqrt(2 * ((matrix**2).sum() - (jnp.diag(matrix) ** 2).sum()))
    atol = deviation / oracle**0.5

    def run(key: Any) -> Any:
        return estimate_trace(matrix, key, atol=atol, max_matvecs=4000, batch=4)

    got = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(7), 1000))
    covered = jnp.abs(got.value - jnp.trace(matrix)) <= 1.96 * got.std_error
    assert 0.9 <= covered.mean() <= 0.98
    assert got.num_matvecs.mean() <= 1.2 * oracle
    assert got.converged.all()
