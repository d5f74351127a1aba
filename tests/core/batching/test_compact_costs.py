"""`Compact`: what a batch evaluates and stores, and what does not gain from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.core.batching.counting import LaneCounter
from tests.core.batching.logistic import COMPACT, A, N, X, logistic, logistic_expected
from tests.support.compiled import temporary
from tests.support.reference import assert_close

EACH_FORM = pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])


@EACH_FORM
def test_what_is_evaluated_is_what_the_report_says(unknown):
    counter, counts = LaneCounter(), np.random.RandomState(0).geometric(0.1, 50)
    compact = lx.Compact(2, 4)

    def f(n):
        step = lambda x: counter(x) + 1.0
        if unknown:
            return lx.while_loop(lambda x: x < n.astype(float), step, 0.0, lanes=compact)
        return lx.fori_loop(0, n, lambda _, x: step(x), 0.0, lanes=compact)

    report = lx.lane_report(counts, lanes=compact)
    stretches = report.stages if unknown else report.groups
    wanted = sum(len(s.active) for s in stretches), sum(s.lane_steps for s in stretches)
    assert counter.of(jax.jit(jax.vmap(f)), counts) == wanted
    assert wanted[1] < 0.6 * sum(s.lane_steps for s in report.lockstep)


@EACH_FORM
@pytest.mark.parametrize("inside", [True, False], ids=["vmap_of_grad", "grad_of_vmap"])
def test_gradients_gain_as_values_do(unknown, inside):
    counter, counts = LaneCounter(), np.random.RandomState(0).geometric(0.1, 50)
    compact = lx.Compact(2, 4)

    def f(x, n):
        step = lambda x: jnp.sin(x) + counter(x)
        if unknown:
            body = lambda c: (step(c[0]), c[1] + 1)
            return lx.while_loop(
                lambda c: c[1] < n, body, (x, 0), max_steps=100, kind=lx.Checkpointed(), lanes=compact
            )[0]
        return lx.fori_loop(0, n, lambda _, x: step(x), x, max_steps=100, kind=lx.Checkpointed(), lanes=compact)

    inner = jax.vmap(jax.grad(f))
    outer = jax.grad(lambda x, n: jax.vmap(f)(x, n).sum())
    _, found = counter.of(jax.jit(inner if inside else outer), np.ones(50), counts)
    report = lx.lane_report(counts, lanes=compact)
    stretches = report.stages if unknown and not inside else report.groups
    steps = sum(s.lane_steps for s in stretches)
    # Forward and two replays; a batch of gradients walks forward once more, in groups (its values may be in stages).
    forward = sum(s.lane_steps for s in report.stages) if unknown else steps
    assert found <= (forward + 3 * steps if inside else 3 * steps)


def test_memory_of_a_gradient():
    """Groups store what lockstep does, but the states of a block for one group only; stages a third more."""
    y, n = np.ones((1024, 16)), np.arange(1024) % 100

    def memory(lanes, unknown):
        def f(y, n):
            body = lambda c: (jnp.tanh(c[0]), c[1] + 1)
            goes_on = lambda c: c[1] < n
            kind = lx.Checkpointed()
            if unknown:
                return lx.while_loop(goes_on, body, (y, 0), max_steps=400, throw=False, kind=kind, lanes=lanes)[0].sum()
            step = lambda _, y: jnp.tanh(y)
            return lx.fori_loop(0, n, step, y, max_steps=400, throw=False, kind=kind, lanes=lanes).sum()

        gradient = jax.grad(lambda y: jax.vmap(f)(y, n).sum())
        return temporary(jax.jit(gradient).lower(y).compile())

    assert memory("compact", unknown=False) < 0.75 * memory("lockstep", unknown=False)
    assert memory("compact", unknown=True) < 1.35 * memory("lockstep", unknown=True)


@EACH_FORM
def test_auto_shares_its_memory_among_the_parts(unknown):
    """So all of them together store no more than one loop would."""
    f = logistic(COMPACT, lx.Auto(memory=7 * 8 * 6), unknown)
    gradient = jax.jit(jax.grad(lambda x: jax.vmap(f)(A, x, N).sum()))
    assert_close(gradient(X), logistic_expected(A, X, N)[1][1])
    small = logistic(COMPACT, lx.Auto(memory=8), unknown)
    with pytest.raises(ValueError, match=r"Auto\(memory=8\).*at least one carry"):
        jax.make_jaxpr(jax.grad(lambda x: jax.vmap(small)(A, x, N).sum()))(X)


def test_a_loop_that_is_not_batched_is_as_it_is_without():
    f, g = logistic(COMPACT), logistic("lockstep")
    same = [str(jax.make_jaxpr(jax.grad(h))(2.0, 0.3, 4)).replace(repr(COMPACT), repr(lx.Lockstep())) for h in (f, g)]
    assert same[0] == same[1]
