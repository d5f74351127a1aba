"""`Compact`: finished lanes leave the batch, and values and derivatives stay those of each lane."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import loopax as lx
from tests.core.batching.counting import alone, single
from tests.core.batching.logistic import COMPACT, A, N, X, logistic, logistic_expected
from tests.support.problem import BOUND, KINDS, LOOPS, W, name_of
from tests.support.reference import assert_close

LANES = 9  # with COMPACT: groups of 2, 3, 3 and 3 (two places are left), or stages of 9, 5, 3 and 2
RANDOM = np.random.RandomState(3)
COUNTS = np.array([3, 0, BOUND, 1, 5, BOUND, 2, 7, 4])
OWN = (RANDOM.randn(LANES, 3, 3) * 0.4, RANDOM.randn(LANES, 3), RANDOM.randn(LANES, BOUND, 3), COUNTS)
SHARED_WEIGHTS = (None, 0, 0, 0)
EACH_FORM = pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])
# Groups ("scan", "fori", "reverse") and stages (the others) do not depend on what is stored, and kinds do not depend
# on how lanes run: each loop with one kind, each kind in groups and in stages.
CASES = [
    ("scan", KINDS[0]),
    ("fori", KINDS[1]),
    ("reverse", KINDS[3]),
    ("scan", KINDS[2]),
    ("while", KINDS[0]),
    ("stop", KINDS[1]),
    ("reverse_stop", KINDS[2]),
    ("while", KINDS[3]),
]


@ft.cache
def expected(loop):
    return alone(single(loop), *OWN)


def half(first):
    """Every second case in the fast part: both tests together have each kind in groups and in stages there."""
    marks = [() if (i + i // 4) % 2 == first else pytest.mark.slow for i in range(len(CASES))]
    return [pytest.param(*case, marks=slow) for case, slow in zip(CASES, marks, strict=True)]


@pytest.mark.parametrize(("loop", "kind"), half(0), ids=name_of)
def test_values_and_gradients_are_those_of_each_lane(loop, kind):
    inside = jax.vmap(jax.value_and_grad(LOOPS[loop][0](kind, lanes=COMPACT), (0, 1, 2)))
    assert_close(jax.jit(inside)(*OWN), expected(loop))


@pytest.mark.parametrize(("loop", "kind"), half(1), ids=name_of)
def test_gradients_of_a_batch_are_those_of_each_lane(loop, kind):
    lanes = jax.vmap(LOOPS[loop][0](kind, lanes=COMPACT))
    outside = jax.value_and_grad(lambda *args: lanes(*args).sum(), (0, 1, 2))
    values, gradients = expected(loop)
    assert_close(jax.jit(outside)(*OWN), (values.sum(), gradients))


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_gradient_of_shared_weights(loop):
    """With equal weights of all lanes in the sum, each lane's gradient would be its own."""
    program, weights = LOOPS[loop][0](lx.Checkpointed(), lanes=COMPACT), np.arange(1.0, LANES + 1)
    total = lambda w, h, xs, n: weights @ jax.vmap(program, SHARED_WEIGHTS)(w, h, xs, n)
    _, lanes = alone(single(loop), np.stack([W] * LANES), *OWN[1:])
    w, h, xs = (weights.reshape(-1, *(1,) * (g.ndim - 1)) * g for g in lanes)
    assert_close(jax.jit(jax.grad(total, (0, 1, 2)))(W, *OWN[1:]), (w.sum(0), h, xs))


@pytest.mark.parametrize("unknown", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["groups", "stages"])
def test_higher_derivatives_in_any_order(unknown):
    f = logistic(COMPACT, unknown=unknown)
    _, slopes, hessian = logistic_expected(A, X, N)

    @jax.jit
    def found(a, x):
        lanes = lambda a, x: jax.vmap(f)(a, x, N)
        total = lambda a, x: lanes(a, x).sum()
        return {
            "hessians of lanes": jax.vmap(jax.hessian(f, (0, 1)))(a, x, N),
            "hessian of the sum": jax.tree.map(jnp.diagonal, jax.hessian(total, (0, 1))(a, x)),
            "tangents": jax.jvp(lanes, (a, x), (a, x))[1],
            "recomputed": jax.grad(jax.checkpoint(total), (0, 1))(a, x),
            "of gradients": jax.grad(lambda a: jax.vmap(jax.grad(f, 1))(a, x, N).sum())(a),
        }

    wanted = {
        "hessians of lanes": hessian,
        "hessian of the sum": hessian,
        "tangents": slopes[0] * A + slopes[1] * X,
        "recomputed": slopes,
        "of gradients": hessian[0][1],
    }
    assert_close(found(A, X), wanted)


@pytest.mark.slow
@EACH_FORM
def test_reverse_over_reverse_and_linearized(unknown):
    f = logistic(COMPACT, unknown=unknown)
    _, slopes, hessian = logistic_expected(A, X, N)

    @jax.jit
    def found(a, x):
        _, linear = jax.linearize(lambda a, x: jax.vmap(f)(a, x, N), a, x)
        return jax.vmap(jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)))(a, x, N), linear(a, x)

    assert_close(found(A, X), (hessian, slopes[0] * A + slopes[1] * X))


AROUND = {
    "nothing": lambda step: step,
    "checkpoint": jax.checkpoint,
    "scan": lambda step: lambda x: lax.scan(lambda x, _: (step(x), None), x, length=1)[0],
    "cond": lambda step: lambda x: lax.cond(x.sum() > -1.0, step, lambda x: x, x),
}


@EACH_FORM
@pytest.mark.parametrize("around", AROUND)
def test_a_batch_in_the_body_of_a_loop(unknown, around):
    """Its steps are known to the outer loop's division, though they stand in an equation with what is not."""
    step = AROUND[around](lambda x: jnp.tanh(jax.vmap(logistic(COMPACT, unknown=unknown))(A, x, N)))

    def total(x):
        return lx.fori_loop(0, 2, lambda _, x: step(x), x, kind=lx.Residuals()).sum()

    wanted, x = np.ones(len(X)), X
    for _ in range(2):
        y, (_, slope), _ = logistic_expected(A, x, N)
        x, wanted = np.tanh(y), wanted * slope * (1 - np.tanh(y) ** 2)
    assert_close(jax.jit(jax.grad(total))(X), wanted)


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
