"""Blocks of free lanes that cost much: they run for the lanes that are at them, in batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.ir.lane_choice import IfGathered, gathered
from loopax._src.core.ir.lanes import Compact, Lockstep
from tests.core.batching.counting import LaneCounter
from tests.support.reference import assert_close

LANES, HIDDEN = 128, 256
RANDOM = np.random.RandomState(0)
WEIGHTS = [RANDOM.randn(*shape) * 0.1 for shape in [(4, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4)]]
STARTS = RANDOM.randn(LANES, 4)
COUNTS = 1 + np.minimum(RANDOM.pareto(1.0, (LANES, 3)) * 2, 11).astype(int)
COUNTER = LaneCounter()


def program(lanes, count=lambda x: 0.0):
    """Nested loops around a network, with given numbers of inner steps."""

    def f(weights, y, counts):
        def inner(_, y):
            h = y
            for w in weights:
                h = jnp.tanh(h @ w)
            return y + 0.1 * h + count(y.sum())

        def outer(y, n):
            y = lx.fori_loop(0, n, inner, y, max_steps=12)
            return y * 0.9, y[0]

        y, ys = lx.scan(outer, y, counts, lanes=lanes)
        return (y**2).sum() + ys.sum()

    return f


def mapped(f):
    return jax.jit(jax.vmap(f, (None, 0, 0)))


def test_evaluations_are_those_of_batches_of_the_lanes_at_the_block():
    f = mapped(program("free", COUNTER))
    calls, evaluations = COUNTER.of(f, WEIGHTS, STARTS, COUNTS)
    needed = COUNTS.sum(1)
    at_block = [int((needed > i).sum()) for i in range(needed.max())]  # no lane waits here
    assert evaluations == calls * 16
    assert calls == sum(-(-lanes // 16) for lanes in at_block)
    assert evaluations <= 0.7 * LANES * needed.max()  # those of all lanes in each iteration


def test_values():
    wanted = mapped(program("lockstep"))(WEIGHTS, STARTS, COUNTS)
    assert_close(mapped(program("free"))(WEIGHTS, STARTS, COUNTS), wanted)
    few = slice(0, 60)  # too few for batches
    assert_close(mapped(program("free"))(WEIGHTS, STARTS[few], COUNTS[few]), wanted[few])


def derivatives(how):
    """Of a batch, in each order of derivative and batch."""
    f = program(how)
    total = lambda weights, y: jax.vmap(f, (None, 0, 0))(weights, y, COUNTS).sum()
    each = lambda weights, y: jax.vmap(jax.grad(f, (0, 1)), (None, 0, 0))(weights, y, COUNTS)

    @jax.jit
    def of(weights, y):
        tangent = jax.jvp(total, (weights, y), (weights, jnp.ones_like(y)))
        of_lanes, own = each(weights, y)
        return jax.value_and_grad(total, (0, 1))(weights, y), tangent, [w.sum(0) for w in of_lanes], own

    return of


@pytest.mark.slow
def test_derivatives():
    assert_close(derivatives("free")(WEIGHTS, STARTS), derivatives("lockstep")(WEIGHTS, STARTS))


def test_what_costs_little_and_what_is_large_is_not_gathered():
    def how(lanes, hidden, size=4):
        x, w = jnp.zeros(size), jnp.zeros((size, hidden))
        body = jax.make_jaxpr(lambda _, w, x: jnp.tanh(x @ w) @ w.T)(0, w, x)
        return gathered(IfGathered(), body, 1, [jax.typeof(x)], lanes)

    assert how(64, 512, 64) == Compact(min_lanes=16)
    assert how(63, 512, 64) == how(None, 512, 64) == Lockstep()  # no two batches; lanes on several devices
    assert how(64, 16) == Lockstep()  # costs little
    assert how(64, 8, 2**12) == Lockstep()  # more is moved than computed
    assert how(1024, 512, 64) == Lockstep()  # a step of all lanes is computed on several cores


def test_two_maps():
    double = lambda how: jax.jit(jax.vmap(jax.vmap(program(how), (None, 0, 0)), (None, 0, 0)))
    in_two = lambda x: x.reshape(2, LANES // 2, *x.shape[1:])
    found = double("free")(WEIGHTS, in_two(STARTS), in_two(COUNTS))
    assert_close(found.reshape(-1), mapped(program("lockstep"))(WEIGHTS, STARTS, COUNTS))
