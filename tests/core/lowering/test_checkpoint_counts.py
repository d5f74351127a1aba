"""How often steps are evaluated with a budget of checkpoints, with and without a bound."""

from functools import partial
from itertools import islice

import jax
import pytest

import loopax as lx
from benchmarks.counter import Counter
from loopax import schedule
from tests.core.lowering.test_memory import carries

STEPS = 1000


def count_evaluations(loop, *args):
    counter = Counter()
    return counter.of(jax.jit(jax.grad(partial(loop, counter))), 1.0, *args)


def known(counter, x, n, checkpoints, bound=None):
    kind = lx.Checkpointed(checkpoints)
    return lx.fori_loop(0, n, lambda i, x: counter(x) * 0.9, x, kind=kind, max_steps=bound)


def unknown(counter, x, n, checkpoints, bound=None):
    body = lambda c: (counter(c[0]) * 0.9, c[1] + 1)
    return lx.while_loop(lambda c: c[1] < n, body, (x, 0), kind=lx.Checkpointed(checkpoints), max_steps=bound)[0]


def online_evaluations(n, slots):
    *_, stored = islice(schedule.online(slots), n)
    return schedule.evaluations_from(stored, n, slots)


@pytest.mark.parametrize("checkpoints", [3, pytest.param(44, marks=pytest.mark.slow)])
def test_as_many_evaluations_as_the_schedule_says(checkpoints):
    """The optimum for a length that is static, and for one that is not, with a bound."""
    best = schedule.evaluations(STEPS, checkpoints)
    assert count_evaluations(lambda count, x: known(count, x, STEPS, checkpoints)) == best
    assert count_evaluations(lambda count, x, n: known(count, x, n, checkpoints, bound=1500), STEPS) == best


@pytest.mark.parametrize("checkpoints", [1, 2, 20, *(pytest.param(c, marks=pytest.mark.slow) for c in (5, 30))])
def test_any_number_of_steps(checkpoints):
    """The optimum for a known length, the online schedule for an unknown one."""
    counter = Counter()
    with_known = jax.jit(jax.grad(lambda x, n: known(counter, x, n, checkpoints)))
    with_unknown = jax.jit(jax.grad(lambda x, n: unknown(counter, x, n, checkpoints)))
    for n in (0, 1, 2, 3, 29, 30, 31, 32, 100, *([STEPS] if checkpoints > 2 else [])):
        best = schedule.evaluations(n, checkpoints)
        assert counter.of(with_known, 1.0, n) == best
        evaluated = counter.of(with_unknown, 1.0, n)
        assert evaluated == (online_evaluations(n, checkpoints) if n else 0)
        assert evaluated <= 1.5 * best


def test_two_levels_where_the_checkpoints_allow_for_them():
    """64 checkpoints for 1000 steps: 32 blocks of 32 steps, within 2 % of the optimum."""
    evaluated = count_evaluations(lambda count, x: known(count, x, 1000, 64))
    assert schedule.evaluations(1000, 64) < evaluated <= 1.02 * schedule.evaluations(1000, 64)


def test_but_not_where_the_bound_may_be_far_above_the_steps_that_are_taken():
    counter = Counter()
    with_known = jax.jit(jax.grad(lambda x, n: known(counter, x, n, 64, bound=1000)))
    with_unknown = jax.jit(jax.grad(lambda x, n: unknown(counter, x, n, 64, bound=1000)))
    for n in (50, 100, 1000):
        best = schedule.evaluations(n, 64)
        assert counter.of(with_known, 1.0, n) == best
        assert counter.of(with_unknown, 1.0, n) == best


def test_more_checkpoints_than_steps():
    """No step is evaluated again but for its derivative, and no more is stored than there are steps."""
    counter = Counter()
    gradient = jax.jit(jax.grad(lambda x, n: known(counter, x, n, 8, bound=8)))
    for steps in (7, 8):
        assert counter.of(gradient, 1.0, steps) == 2 * steps
    assert carries(lx.Checkpointed(10**6), 100) == carries(lx.Bounded(), 100)
