"""`Compact`: finished lanes leave the batch, and values and derivatives stay those of each lane."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loopax as lx
from tests.core.batching.logistic import COMPACT, A, N, X, logistic, logistic_expected
from tests.support.reference import assert_close

EACH_FORM = pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])


@EACH_FORM
def test_a_second_vmap_joins_the_batch(unknown):
    f = logistic(COMPACT, unknown=unknown)
    a, n = np.stack([A] * 3, 1), np.stack([N, N + 1, N + 2], 1) % 7
    twice = jax.jit(jax.vmap(jax.vmap(jax.value_and_grad(f, (0, 1))), (0, None, 0)))
    values, slopes, _ = logistic_expected(a, np.stack([X[:3]] * 7), n)
    assert_close(twice(a, X[:3], n), (values, slopes))
    sizes = [eqn.params["axis"].size for eqn in batches(jax.make_jaxpr(twice)(a, X[:3], n).jaxpr)]
    assert sizes
    assert set(sizes) == {21}


def batches(jaxpr):
    """The batches of a program, wherever they are."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "compact_vmap":
            yield eqn
        else:
            for value in eqn.params.values():
                yield from batches(value.jaxpr) if hasattr(value, "jaxpr") else ()


def test_large_weights_are_not_repeated_to_join_a_batch():
    """An ensemble of large models over a batch: each model has lanes of its own."""

    def f(w, x, n):
        return lx.fori_loop(0, n, lambda _, x: jnp.tanh(w @ x), x, max_steps=6, lanes=COMPACT).sum()

    models, x = np.stack([np.eye(60)] * 3), np.ones((7, 60))
    twice = jax.vmap(jax.vmap(f, (None, 0, 0)), (0, None, None))
    sizes = {eqn.params["axis"].size for eqn in batches(jax.make_jaxpr(twice)(models, x, N).jaxpr)}
    assert 21 not in sizes
    one = 60 * np.array([ft.reduce(lambda x, _: np.tanh(x), range(n), 1.0) for n in N])
    assert_close(jax.jit(twice)(models, x, N), np.stack([one] * 3))


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(0, 6), min_size=7, max_size=7), unknown=st.booleans())
def test_any_counts(counts, unknown):
    values, (slopes, _), _ = logistic_expected(A, X, counts)
    assert_close(ANY[unknown](A, X, np.array(counts)), (values, slopes))


ANY = {unknown: jax.jit(jax.vmap(jax.value_and_grad(logistic(COMPACT, unknown=unknown)))) for unknown in (False, True)}


SIZES = [(1, 2, 1), (7, 2.5, 3), (20, 2, 3)]
SIZES += [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2, 1), (13, 4, 1))]


@pytest.mark.parametrize(("lanes", "shrink", "min_lanes"), SIZES)
def test_any_sizes(lanes, shrink, min_lanes):
    """Rows that are read and written, in the order of the lanes."""
    rows = np.arange(lanes * 4.0).reshape(lanes, 4)

    def run(counts, stops):
        def f(xs, n):
            stop = (lambda c, _: c[1] >= n - 1) if stops else None
            length = jnp.where(n > 0, 4, 0) if stops else n
            step = lambda c, x: ((c[0] + x, c[1] + 1), c[0] * x)
            return lx.scan(step, (0.0, 0), xs, length=length, lanes=lx.Compact(shrink, min_lanes), stop=stop)

        return jax.vmap(f)(rows, counts)

    def wanted(counts):
        """The sum of the first rows, their number, and each row times the sum before it."""
        taken = np.where(np.arange(4) < counts[:, None], rows, 0.0)
        return (taken.sum(1), counts), taken * (np.cumsum(taken, 1) - taken)

    found = jax.jit(lambda counts: (run(counts, stops=False), run(counts, stops=True)))
    for seed in range(5):
        counts = np.random.RandomState(seed).randint(0, 5, lanes)
        one_at_least = np.where(counts > 0, np.maximum(counts - 1, 1), 0)
        assert_close(found(counts), (wanted(counts), wanted(one_at_least)))
