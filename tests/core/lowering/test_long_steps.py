"""A sweep with slots that holds a long step once for all that is evaluated again: the same steps, in one loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from benchmarks.counter import Counter
from loopax._src.core.lowering import sweep_bodies as sweep_common
from loopax._src.schedule.binomial import evaluations
from tests.core.lowering.test_checkpoint_counts import RECORDS, known, large, online_evaluations, small, unknown
from tests.core.lowering.test_memory import STATE, WEIGHTS

LENGTHS = (0, 1, 2, 3, 4, 6, 7, 8, 29, 30, 31, 100)


@pytest.fixture
def all_are_long(monkeypatch):
    monkeypatch.setattr(sweep_common, "LONG_STEP", 0)


@pytest.mark.usefixtures("all_are_long")
@pytest.mark.parametrize("step", [small, large])
@pytest.mark.parametrize("slots", [3, *(pytest.param(c, marks=pytest.mark.slow) for c in (1, 2, 5, 20))])
def test_evaluations_and_gradients(slots, step):
    counter = Counter()
    with_known = jax.jit(jax.grad(lambda x, n: known(step, counter, x, n, slots)))
    with_unknown = jax.jit(jax.grad(lambda x, n: unknown(step, counter, x, n, slots)))
    stored = jax.jit(
        jax.grad(lambda x, n: lx.fori_loop(0, n, lambda i, x: step(counter, x), x, max_steps=100, kind="residuals"))
    )
    for n in LENGTHS:
        assert counter.of(with_known, 1.0, n) == evaluations(n, slots, RECORDS[step])
        assert counter.of(with_unknown, 1.0, n) == (online_evaluations(step, n, slots) if n else 0)
        for gradient in (with_known, with_unknown):
            np.testing.assert_allclose(gradient(1.0, n), stored(1.0, n), rtol=1e-12)


@pytest.mark.parametrize("length_known", [True, False])
def test_copies_of_a_long_step(length_known):
    """One in the forward loop, one for all that is evaluated again, and one in the derivative."""

    def step(h):
        for _ in range(100):
            h = jnp.tanh(WEIGHTS @ h) + 0.1
        return h

    def energy(h, n):
        if length_known:
            return lx.fori_loop(0, n, lambda i, h: step(h), h, kind=lx.Checkpointed(5)).sum()
        return lx.while_loop(lambda h: h.sum() > n, step, h, kind=lx.Checkpointed(5)).sum()

    assert jax.jit(jax.grad(energy)).lower(STATE, 7).as_text().count("stablehlo.tanh") == 3 * 100
