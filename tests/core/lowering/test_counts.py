"""Claims about cost that do not depend on the machine: body evaluations, traces, lanes."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from benchmarks.counter import Counter
from loopax._src.schedule import binomial
from tests.support.problem import KINDS, WITH_LAX, name_of


@cache
def programs(kind):
    """A loop, and its gradient, of any number of steps up to 100."""
    counter = Counter()

    def loop(x, n):
        return lx.fori_loop(0, n, lambda i, x: counter(x) * 0.9, x, max_steps=100, kind=kind)

    return counter, jax.jit(loop), jax.jit(jax.grad(loop))


def evaluations(kind, n):
    counter, forward, gradient = programs(kind)
    return counter.of(forward, 1.0, np.int32(n)), counter.of(gradient, 1.0, np.int32(n))


# For forward and gradient together.
MOST = {"Checkpointed": 2.0, "Checkpointed3": 5.76, "Bounded": 2.0, "Residuals": 1.0}


@pytest.mark.parametrize("n", [0, 1, 9, 10, 11, 99, 100])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_body_evaluations(kind, n):
    forward, both = evaluations(kind, n)
    assert forward == n
    assert both <= MOST[name_of(kind)] * n


def test_blocks_are_replayed_but_for_their_last_step():
    """100 steps of an 8-byte carry: blocks of 10 (that many fit in a small loop's memory, but no fewer).

    The residuals of a step are two numbers, so the replay stores states.
    """
    counter = Counter()
    loop = lambda x: lx.fori_loop(0, 100, lambda i, x: jnp.sin(counter(x)), x, kind=lx.Checkpointed())
    assert 200 < counter.of(jax.jit(jax.grad(loop)), 1.0) < 300


class Adder:
    """A body that is no function."""

    def __init__(self):
        self.traces = 0

    def __call__(self, carry, x):
        self.traces += 1
        return carry + x, carry


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_one_trace_for_all_step_counts(kind):
    adder = Adder()
    program = jax.jit(lambda xs, n: lx.scan(adder, jnp.zeros(()), xs, length=n, kind=kind))
    for n in range(5):
        program(np.arange(6.0), np.int32(n))
    assert adder.traces == 1


@pytest.mark.parametrize("wrap", [lambda f: f, partial, jax.tree_util.Partial, jax.jit])
def test_one_trace_for_a_callable_that_is_no_function(wrap):
    """As in `jax.lax`, if it is the same object."""
    adders = [Adder(), Adder()]
    for adder in adders:
        body = wrap(adder)
        for start in (0.0, 1.0, 2.0):
            lx.scan(body, start, jnp.arange(6.0))
    assert [adder.traces for adder in adders] == [1, 1]


def test_gradients_and_batches_do_not_trace_again():
    dtypes = []

    def body(i, x):
        dtypes.append(jnp.zeros(()).dtype)
        return jnp.sin(x)

    program = lambda x, n: lx.fori_loop(0, n, body, x, max_steps=9)
    jax.jit(jax.vmap(jax.hessian(program))).lower(jnp.ones(3), jnp.arange(3))
    assert dtypes == [jnp.float64]
    with jax.enable_x64(False):  # another configuration does
        program(jnp.float32(1), 2)
    assert dtypes == [jnp.float64, jnp.float32]


def test_a_finished_lane_does_not_hang():
    """The inner loop of the first lane would never end from the state in which that lane has finished."""

    def program(x, step):
        def inner(x):
            total, _ = lx.while_loop(lambda c: c[0] < 1.0, lambda c: (c[0] + c[1], c[1]), (jnp.zeros(()), step))
            return x + total

        return lx.while_loop(lambda x: x < 3.0, inner, x)

    result = jax.jit(jax.vmap(program))(jnp.array([5.0, 0.0]), jnp.array([0.0, 1.0]))
    assert result.tolist() == [5.0, 3.0]


def test_the_same_body_under_every_kind():
    """Programs that share a traced body do not share what their kinds store."""
    counter = Counter()

    def body(i, x):
        return counter(x) * 0.9

    found = {}
    for kind in [*KINDS, *reversed(KINDS)]:
        gradient = jax.jit(jax.grad(lambda x, kind=kind: lx.fori_loop(0, 100, body, x, kind=kind)))
        found.setdefault(name_of(kind), set()).add(counter.of(gradient, 1.0))
    assert found["Residuals"] == {100}
    assert found["Bounded"] == {200}
    assert found["Checkpointed3"] == {binomial.evaluations(100, 3, records=True)}
    assert found["Checkpointed"] == {200}


# ---- blocks of a static length


@pytest.mark.parametrize("reverse", [False, True])
def test_xla_knows_the_lengths_of_even_blocks(reverse):
    """The loops over the steps of a block: forward, to recompute, and back. 101 steps make no even blocks.

    XLA tries up to 128 steps out where it does not know a length otherwise; here blocks have 200.
    """

    def known(length):
        xs = jnp.linspace(0.0, 1.0, length)
        loss = lambda h: lx.scan(lambda h, x: (jnp.sin(h) + x, h), h, xs, reverse=reverse, kind="checkpointed")[1].sum()
        text = jax.jit(jax.grad(loss)).lower(jnp.ones(64)).compile().as_text()
        assert text is not None
        return text.count("known_trip_count")

    assert known(40_000) >= 3
    assert known(101) <= 1  # of the loop over blocks, with JAX 0.12


@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [16, 20, 36])
def test_gradients_of_even_blocks(length, reverse, unroll):
    xs, h = jnp.linspace(0.0, 1.0, length), jnp.linspace(0.1, 0.9, 5)

    def loss(h, xs, scan, **options):
        h, ys = scan(lambda h, x: (jnp.sin(h) + x * h, h * x), h, xs, reverse=reverse, unroll=unroll, **options)
        return (h.sum() + (ys * jnp.cos(ys)).sum()) ** 2

    expected = jax.value_and_grad(loss, (0, 1))(h, xs, jax.lax.scan)
    found = jax.value_and_grad(loss, (0, 1))(h, xs, lx.scan, kind="checkpointed")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), found, expected)
