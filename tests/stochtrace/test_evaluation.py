"""An estimate is the same however it is evaluated: in batches, under a bound, in lanes, in a loop, eagerly."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

import loopax as lx
from loopax.stochtrace import estimate_trace
from tests.stochtrace.cases import (
    ESTIMATORS,
    KEY,
    PSD,
    N,
    compiled,
    each_estimator,
    estimate,
    fast_and_slow,
)
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
def test_lanes_have_counts_and_tolerances_of_their_own(estimator: Any) -> None:
    counts, tolerances = np.array([3, 11, 6]), np.array([10.0, 1e-3, 0.1])
    bounded = compiled(estimator, max_matvecs=N)
    got = jax.jit(jax.vmap(lambda n: bounded(PSD, num_matvecs=n)))(counts)
    assert_close(got, stacked([bounded(PSD, num_matvecs=n) for n in counts]))
    until = compiled(estimator, max_matvecs=10 * estimator.products_per_sample)
    got = jax.jit(jax.vmap(lambda rtol: until(PSD, rtol=rtol)))(tolerances)
    assert_close(got, stacked([until(PSD, rtol=rtol) for rtol in tolerances]))


@fast_and_slow(ESTIMATORS[:2], ESTIMATORS[2:3])
def test_lanes_have_operators_and_keys_of_their_own(estimator: Any) -> None:
    keys, scales = jax.random.split(jax.random.key(1), 3), np.arange(1.0, 4.0)
    run = jax.jit(lambda scale, key: estimate(estimator, key=key)(scale * PSD))
    alone = [run(scale, key) for scale, key in zip(scales, keys, strict=True)]
    assert_close(jax.jit(jax.vmap(run))(scales, keys), stacked(alone))


@fast_and_slow(ESTIMATORS[:2], ESTIMATORS[3:])
def test_eagerly_as_compiled(estimator: Any) -> None:
    result = compiled(estimator)(PSD)
    assert_close(estimate(estimator, key=jax.random.PRNGKey(0))(PSD), result)
    shapes = eqx.filter_eval_shape(estimate(estimator), PSD)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), result)


@fast_and_slow(ESTIMATORS[:1], ESTIMATORS[3:])
def test_without_compilation_as_compiled(estimator: Any) -> None:
    result = compiled(estimator)(PSD)
    with jax.disable_jit():
        assert_close(estimate(estimator)(PSD), result)


@fast_and_slow(ESTIMATORS[:2], ESTIMATORS[3:])
def test_in_the_body_of_a_loop(estimator: Any) -> None:
    def body(i: Any, total: Any) -> Any:
        return total + estimate(estimator, key=jax.random.fold_in(KEY, i), num_matvecs=3 + i, max_matvecs=N)(PSD).value

    bounded = compiled(estimator, max_matvecs=N)
    alone = [bounded(PSD, key=jax.random.fold_in(KEY, i), num_matvecs=3 + i).value for i in range(3)]
    assert_close(jax.jit(lambda: lx.fori_loop(0, 3, body, 0.0))(), sum(map(float, alone)))
