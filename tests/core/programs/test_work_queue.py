"""`lanes_map`: any number of items through a fixed number of lanes."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.core.batching.counting import LaneCounter
from tests.support.compiled import temporary
from tests.support.problem import name_of
from tests.support.reference import assert_close

ITEMS = 37
RANDOM = np.random.RandomState(0)
COUNTS = RANDOM.randint(0, 9, ITEMS)
XS = RANDOM.randn(ITEMS, 3)
W = RANDOM.randn(3, 3) * 0.5


def with_while(w, x, n, kind):
    x = jnp.sin(x)
    body = lambda c: (jnp.tanh(w @ c[0] + x), c[1] + 1)
    h, _ = lx.while_loop(lambda c: c[1] < n, body, (x, 0), max_steps=10, kind=kind)
    return (h * 2).sum() + n.astype(float), {"h": h}


def with_scan(w, x, n, kind):
    """Rows that all items share are read, and rows are written."""
    step = lambda h, r: (jnp.tanh(w @ h + x * r), h.sum() * r)
    h, ys = lx.scan(step, jnp.cos(x), jnp.arange(1.0, 9.0), length=n, kind=kind)
    return (h * 2).sum(), {"ys": ys}


def weighed(outputs):
    """A scalar that weighs every item differently."""
    weigh = lambda y: (jnp.arange(1.0, ITEMS + 1) * y.reshape(ITEMS, -1).sum(1)).sum()
    return sum(map(weigh, jax.tree.leaves(outputs)))


def values_and_gradients(mapped):
    """The outputs of a map, and a gradient with respect to both arguments."""

    def total(w, xs):
        outputs = mapped(w, xs)
        return weighed(outputs), outputs

    return jax.value_and_grad(total, (0, 1), has_aux=True)


@ft.cache
def expected(f):
    """Values and gradients, which do not depend on the kind."""
    plain = lambda w, xs: jax.vmap(lambda x, n: f(w, x, n, lx.Residuals()))(xs, COUNTS)
    return jax.jit(values_and_gradients(plain))(W, XS)


@pytest.mark.parametrize(
    ("f", "lanes", "kind"),
    [
        pytest.param(with_while, 1, lx.Checkpointed(), marks=pytest.mark.slow),
        pytest.param(with_while, 16, lx.Checkpointed(3), marks=pytest.mark.slow),
        pytest.param(with_scan, 10, lx.Auto(), marks=pytest.mark.slow),  # one of the others
        (with_scan, 64, lx.Checkpointed()),
        (with_while, 8, lx.Bounded()),
        pytest.param(with_scan, 8, lx.Residuals(), marks=pytest.mark.slow),
    ],
    ids=name_of,
)
def test_values_and_gradients_are_those_of_a_map(f, lanes, kind):
    mapped = lambda w, xs: lx.lanes_map(lambda item: f(w, *item, kind), (xs, COUNTS), num_lanes=lanes)
    assert_close(jax.jit(values_and_gradients(mapped))(W, XS), expected(f))


@pytest.mark.slow
def test_other_derivatives_and_vmap():
    def total(w, lanes):
        def f(item):
            x, n = item
            return lx.fori_loop(0, n, lambda _, x: jnp.sin(w * x), x, max_steps=8)

        items = (XS[:9, 0], COUNTS[:9])
        return (lx.lanes_map(f, items, num_lanes=4) if lanes else jax.vmap(lambda *item: f(item))(*items)).sum()

    def derivatives(lanes, w):
        f = lambda w: total(w, lanes)
        return jax.hessian(f)(w), jax.jvp(f, (w,), (w,)), jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w]))

    assert_close(*jax.jit(lambda w: (derivatives(True, w), derivatives(False, w)))(np.float64(0.7)))


def test_lanes_take_new_items_as_they_finish():
    """The iterations are those of the sum of all steps, not those of the slowest item of each batch."""
    counter = LaneCounter()
    counts = np.random.RandomState(1).geometric(0.05, 400)
    f = lambda n: lx.fori_loop(0, n, lambda _, x: x + 0.0 * counter(x) + 1.0, 0.0)
    mapped = jax.jit(lambda n: lx.lanes_map(f, n, num_lanes=16))
    assert mapped(counts).tolist() == counts.tolist()
    iterations, _ = counter.of(mapped, counts)
    batches = counts.reshape(25, 16)
    assert int(counts.sum()) / 16 <= iterations <= int(counts.sum()) / 16 * 1.25 + int(counts.max())
    assert iterations < 0.5 * batches.max(1).sum()


def test_what_stands_around_the_loop_runs_once_for_each_item():
    counter = LaneCounter()

    def f(n):
        x = lx.fori_loop(0, n, lambda _, x: x + 1.0, counter(n.astype(float)))
        return x + counter(x)

    counts = np.arange(40) % 7
    mapped = jax.jit(lambda n: lx.lanes_map(f, n, num_lanes=8))
    assert mapped(counts).tolist() == (4 * counts).tolist()
    _, evaluations = counter.of(mapped, counts)
    assert evaluations == 2 * 40


@pytest.mark.parametrize("gradient", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["value", "gradient"])
def test_memory_does_not_grow_with_the_items(gradient):
    def memory(items, gradient=gradient):
        def f(w, x):
            n = jnp.floor(jnp.abs(x[0]) * 20).astype(int)
            return lx.fori_loop(0, n, lambda _, h: jnp.tanh(w @ h), x, kind=lx.Checkpointed(8)).sum()

        total = lambda w, xs: lx.lanes_map(lambda x: f(w, x), xs, num_lanes=16).sum()
        program = jax.grad(total) if gradient else total
        return temporary(jax.jit(program).lower(np.eye(16), np.ones((items, 16))).compile())

    item = 16 * 8
    few, many = memory(512), memory(4096)
    assert many - few <= 4 * (4096 - 512) * item  # copies of inputs and outputs; the states of a loop are 64 times that
    if gradient:
        assert many < memory(4096, gradient=False) + 16 * 100 * 16 * item


@pytest.mark.parametrize("items", [0, 1, 2])
def test_few_items(items):
    f = lambda x: {"y": lx.fori_loop(0, 2, lambda _, x: x * 2.0, x), "static": "kept"}
    ys = lx.lanes_map(f, jnp.arange(float(items)))
    assert ys["y"].tolist() == [4.0 * i for i in range(items)]
    assert ys["static"] == "kept"


LOOP = lambda _: lx.fori_loop(0, 3, lambda _, x: x + 1.0, 0.0)


@pytest.mark.parametrize(
    ("f", "xs", "lanes", "error", "message"),
    [
        (lambda x: LOOP(x) + LOOP(x), jnp.ones(3), 2, ValueError, "must hold exactly one loop of loopax, and holds 2"),
        (LOOP, jnp.ones(3), 0, ValueError, "lanes_map(num_lanes=...): got 0, expected at least 1"),
        (LOOP, jnp.ones(()), 2, ValueError, "needs a leading axis"),
        (LOOP, (jnp.ones(2), jnp.ones(3)), 2, ValueError, "Got shapes (2,), (3,)"),
    ],
)
def test_bad_arguments(f, xs, lanes, error, message):
    with pytest.raises(error) as raised:
        lx.lanes_map(f, xs, num_lanes=lanes)
    assert message in str(raised.value)
