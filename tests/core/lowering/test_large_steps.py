"""Sweeps that hold a step once for all that is evaluated again: derivatives and counts are those of the other ways."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from benchmarks.counter import Counter
from loopax._src.core.lowering import sweep, sweep_bodies
from loopax._src.schedule.binomial import evaluations
from tests.core.lowering.test_checkpoint_counts import RECORDS, known, large, online_evaluations, small, unknown
from tests.core.lowering.test_memory import STATE, WEIGHTS
from tests.core.test_compositions import KINDS, computed, expected, program
from tests.support.reference import assert_close

# The replay of a long step is one loop; of a large one, the whole sweep is.
WAYS = {"long": (sweep_bodies, "LONG_STEP"), "large": (sweep, "LARGE_STEP")}
slow = pytest.mark.slow


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All steps are so large."""
    monkeypatch.setattr(*WAYS[request.param], 0)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


@pytest.mark.parametrize("kind", [lx.Checkpointed(3), lx.Checkpointed()], ids=repr)
def test_a_step_is_not_evaluated_partially_once_more(kind, monkeypatch):
    """It has been where it was transposed, loops and calls in it as well."""
    monkeypatch.delattr(sweep_bodies, "partial_eval_jaxpr")
    inner = jax.jit(lambda x: lx.fori_loop(0, 3, lambda i, x: jnp.sin(x) * x, x))
    gradient = jax.grad(lambda x: lx.fori_loop(0, 9, lambda i, x: inner(jnp.cos(x)), x, kind=kind))
    assert "while" in jax.jit(gradient).lower(1.0).as_text()


SLOW = [("reverse over reverse", "reverse", "slots"), ("hessian", "reverse_stop", "Checkpointed")]
SLOW += [("jacrev of jacrev", "unbounded while", "slots"), ("vmap of grad", "unbounded while", "slots")]
SLOW += [("grad of vmap", "scan", "Checkpointed"), ("hessian of vmap", "reverse_stop", "slots")]
CASES = [("checkpoint", "scan", "Checkpointed"), ("vmap of grad", "reverse_stop", "slots")]


@pytest.mark.parametrize(("composition", "loop", "kind"), [*CASES, *(pytest.param(*case, marks=slow) for case in SLOW)])
def test_compositions(composition, loop, kind):
    found = jax.jit(lambda n: computed(composition, program(loop, kind), n))(np.int64(6))
    assert_close(found, expected(composition, loop, KINDS[kind].step, KINDS[kind].cut))


@pytest.mark.parametrize("step", [small, large])
@pytest.mark.parametrize("slots", [3, *(pytest.param(c, marks=slow) for c in (1, 2, 10, 20, 64))])
def test_evaluations_and_gradients(slots, step):
    counter = Counter()
    with_known, with_bound, with_unknown = (
        jax.jit(jax.grad(lambda x, n, loop=loop, bound=bound: loop(step, counter, x, n, slots, bound)))
        for loop, bound in ((known, None), (known, 100), (unknown, None))
    )
    stored = lambda x, n: lx.fori_loop(0, n, lambda i, x: step(counter, x), x, max_steps=100, kind="residuals")
    wanted = jax.jit(jax.grad(stored))
    for n in (0, 1, 2, 3, 4, 6, 7, 8, 29, 30, 31, 100):
        assert counter.of(with_known, 1.0, n) == evaluations(n, slots, RECORDS[step])
        assert counter.of(with_unknown, 1.0, n) == (online_evaluations(step, n, slots) if n else 0)
        for gradient in (with_known, with_bound, with_unknown):
            np.testing.assert_allclose(gradient(1.0, n), wanted(1.0, n), rtol=1e-12)


@pytest.mark.parametrize("length_known", [True, False])
def test_copies_of_a_step(length_known, way):
    """One in the forward loop, one for all that is evaluated again, and a long one again in the derivative."""

    def step(h):
        for _ in range(100):
            h = jnp.tanh(WEIGHTS @ h) + 0.1
        return h

    def energy(h, n):
        if length_known:
            return lx.fori_loop(0, n, lambda i, h: step(h), h, kind=lx.Checkpointed(5)).sum()
        return lx.while_loop(lambda h: h.sum() > n, step, h, kind=lx.Checkpointed(5)).sum()

    copies = 3 if way == "long" else 2
    assert jax.jit(jax.grad(energy)).lower(STATE, 7).as_text().count("stablehlo.tanh") == copies * 100
