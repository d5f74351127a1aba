"""A reverse sweep that holds its step once: derivatives and counts are those of the other ways to compile it."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from benchmarks.counter import Counter
from loopax._src.core.lowering import sweep as sweep_large
from loopax._src.schedule.binomial import evaluations
from tests.support.reference import assert_close

KINDS = [lx.Checkpointed(), lx.Checkpointed(1), lx.Checkpointed(3)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=repr)
W = jnp.asarray(np.random.RandomState(0).randn(3, 3)) * 0.5
X = jnp.array([0.3, -0.2, 0.5])
ROWS = jnp.asarray(np.random.RandomState(1).randn(11, 3))


@pytest.fixture(autouse=True)
def _all_steps_are_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sweep_large, "LARGE_STEP", 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


def steps(kind, n, w, x, rows, reverse=False):
    """With an inner loop, constants, rows, an integer in the carry, and outputs."""

    def step(carry, row):
        h, count = carry
        h = lx.fori_loop(0, 2, lambda i, h: jnp.tanh(w @ h + jnp.sin(h) * row), h, kind=kind)
        return (h, count + 1), jnp.cos(h) * row.sum()

    (h, _), ys = lx.scan(step, (x, 0), rows, length=n, reverse=reverse, kind=kind)
    return (h**2).sum() + (ys * ys).sum()


def settle(kind, n, w, x):
    body = lambda c: (jnp.sin(w @ c[0]) * jnp.exp(-c[0] * c[0]), c[1] + 1)
    return (lx.while_loop(lambda c: c[1] < n, body, (x, 0), kind=kind)[0] ** 2).sum()


BY_ROWS = lx.Bounded()


@pytest.mark.parametrize("n", [11, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2))])
@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow), KINDS[2]], ids=repr)
def test_gradients(kind, n):
    gradient = lambda kind: jax.jit(jax.grad(lambda w, x, rows: steps(kind, n, w, x, rows, n == 2), (0, 1, 2)))
    assert_close(gradient(kind)(W, X, ROWS), gradient(BY_ROWS)(W, X, ROWS))


@pytest.mark.slow
@each_kind
def test_second_derivatives(kind):
    twice = lambda kind: jax.jit(
        jax.grad(lambda w, x: (jax.grad(lambda x: steps(kind, 5, w, x, ROWS))(x) ** 2).sum(), (0, 1))
    )
    assert_close(twice(kind)(W, X), twice(BY_ROWS)(W, X))
    hessian = lambda kind: jax.jit(jax.hessian(lambda x: steps(kind, 5, W, x, ROWS)))
    assert_close(hessian(kind)(X), hessian(BY_ROWS)(X))


@pytest.mark.slow
@each_kind
def test_lanes_with_numbers_of_steps_of_their_own(kind):
    counts, starts = jnp.array([0, 1, 7, 11]), jnp.stack([X, -X, 2 * X, X * 0.1])

    def both(kind):
        one = lambda w, x, n: steps(kind, n, w, x, ROWS)
        inside = jax.vmap(jax.grad(one, (0, 1)), (None, 0, 0))(W, starts, counts)
        outside = jax.grad(lambda w, x: jax.vmap(one, (None, 0, 0))(w, x, counts).sum(), (0, 1))(W, starts)
        return inside, outside

    assert_close(jax.jit(both, static_argnums=0)(kind), jax.jit(both, static_argnums=0)(BY_ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [lx.Checkpointed(2), lx.Checkpointed()], ids=repr)
def test_without_a_bound(kind):
    gradient = lambda kind, bound: jax.jit(jax.grad(lambda w, x, n: settle(kind, n, w, x), (0, 1)))
    for n in (0, 1, 9):
        plain = lambda w, x, n=n: (jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(w @ x) * jnp.exp(-x * x), x) ** 2).sum()
        assert_close(gradient(kind, None)(W, X, n), jax.grad(plain, (0, 1))(W, X))
    lanes = jax.vmap(jax.grad(lambda n, x: settle(kind, n, W, x), 1))(jnp.arange(4), jnp.stack([X] * 4))
    assert_close(lanes[3], jax.grad(lambda x: settle(kind, 3, W, x))(X))


@pytest.mark.slow
@each_kind
def test_buffers(kind):
    def total(kind, x):
        def step(i, c):
            b, x = c
            b = b.append(jnp.sin(x) * b.count.astype(float))
            return b, x * 0.9 + b[0] * 0.1

        b, x = lx.fori_loop(0, 7, step, (lx.Buffer(9, like=x), x), kind=kind)
        return (b.rows**2).sum() + x.sum()

    gradient = jax.jit(jax.grad(total, 1), static_argnums=0)
    assert_close(gradient(kind, X), gradient(BY_ROWS, X))


@pytest.mark.parametrize("checkpoints", [3, *(pytest.param(c, marks=pytest.mark.slow) for c in (1, 10, 64))])
def test_as_many_evaluations_as_the_schedule_says(checkpoints):
    counter = Counter()
    loop = lambda x, n: lx.fori_loop(
        0, n, lambda i, x: jnp.sin(counter(x)), x, kind=lx.Checkpointed(checkpoints), max_steps=100
    )
    gradient = jax.jit(jax.grad(loop))
    for n in (0, 1, 2, 3, 29, 31):
        assert counter.of(gradient, 1.0, n) == evaluations(n, checkpoints)


def test_the_step_stands_in_the_program_once():
    """Beside the loop forward: two copies of each inner loop's step, and of the derivative one."""
    loop = lambda x: steps(lx.Checkpointed(3), 11, W, x, ROWS)
    text = jax.jit(jax.grad(loop)).lower(X).as_text()
    assert text.count("stablehlo.tanh") == 3  # forward; in the sweep outside; in the sweep inside
