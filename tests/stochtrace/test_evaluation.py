"""An estimate is the same however it is evaluated: in batches, under a bound, in lanes, in a loop, eagerly."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from loopax.stochtrace import estimate_trace
from tests.stochtrace.cases import ESTIMATORS, KEY, PSD, N, compiled, each_estimator, estimate, fast_and_slow
from tests.support.reference import assert_close


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


@fast_and_slow(ESTIMATORS[:1], ESTIMATORS[3:])
def test_one_compilation_for_ten_counts(estimator: Any) -> None:
    traces = []

    @jax.jit
    def run(n: Any) -> Any:
        traces.append(n)
        return estimate(estimator, num_matvecs=n, max_matvecs=N)(PSD)

    got = {n: run(n) for n in range(2, 12)}  # with all 12 the error is rounding
    assert len(traces) == 1
    assert [int(result.num_matvecs) for result in got.values()] == list(got)
    for n in (2, 7, 11):
        assert_close(got[n], compiled(estimator, num_matvecs=n)(PSD))


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
