"""How often steps are evaluated with a budget of checkpoints, with and without a bound."""

from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from benchmarks.counter import Counter
from loopax._src.schedule.binomial import evaluations, evaluations_from
from loopax._src.schedule.online import online
from tests.core.lowering.test_memory import STATE, WEIGHTS, carries

STEPS = 1000


def count_evaluations(loop, *args):
    counter = Counter()
    return counter.of(jax.jit(jax.grad(partial(loop, counter))), 1.0, *args)


def small(counter, x):
    """A step whose residuals are one number, as its carry is."""
    return counter(x) * 0.9


def large(counter, x):
    """One whose residuals are two numbers: they take more room than its carry, and are not stored."""
    return jnp.sin(counter(x))


RECORDS = {small: True, large: False}  # whether steps that are evaluated again store residuals
EACH_STEP = pytest.mark.parametrize("step", RECORDS)


def known(step, counter, x, n, checkpoints, bound=None):
    kind = lx.Checkpointed(checkpoints)
    return lx.fori_loop(0, n, lambda i, x: step(counter, x), x, kind=kind, max_steps=bound)


def unknown(step, counter, x, n, checkpoints, bound=None):
    body = lambda c: (step(counter, c[0]), c[1] + 1)
    return lx.while_loop(lambda c: c[1] < n, body, (x, 0), kind=lx.Checkpointed(checkpoints), max_steps=bound)[0]


def online_evaluations(step, n, slots):
    *_, stored = islice(online(slots), n)
    return evaluations_from(stored, n, slots, RECORDS[step])


@EACH_STEP
@pytest.mark.parametrize("checkpoints", [3, pytest.param(44, marks=pytest.mark.slow)])
def test_as_many_evaluations_as_the_schedule_says(checkpoints, step):
    """For a length that is static, and for one that is not, with a bound."""
    best = evaluations(STEPS, checkpoints, RECORDS[step])
    assert count_evaluations(lambda count, x: known(step, count, x, STEPS, checkpoints)) == best
    assert count_evaluations(lambda count, x, n: known(step, count, x, n, checkpoints, bound=1500), STEPS) == best


@pytest.fixture(params=["cpu", "h100"])
def device(request):
    """Loops are compiled for one or the other, and run here."""
    with lx.configure(calibration=request.param):
        yield request.param


@pytest.mark.usefixtures("device")
@EACH_STEP
@pytest.mark.parametrize("checkpoints", [20, *(pytest.param(c, marks=pytest.mark.slow) for c in (1, 2, 5, 30))])
def test_any_number_of_steps(checkpoints, step):
    """The binomial schedule for a known length, the online schedule for an unknown one."""
    counter = Counter()
    with_known = jax.jit(jax.grad(lambda x, n: known(step, counter, x, n, checkpoints)))
    with_unknown = jax.jit(jax.grad(lambda x, n: unknown(step, counter, x, n, checkpoints)))
    for n in (0, 1, 2, 3, 29, 30, 31, 32, 100, *([STEPS] if checkpoints > 2 else [])):
        best = evaluations(n, checkpoints, RECORDS[step])
        assert counter.of(with_known, 1.0, n) == best
        evaluated = counter.of(with_unknown, 1.0, n)
        assert evaluated == (online_evaluations(step, n, checkpoints) if n else 0)
        assert evaluated <= 1.5 * best


@pytest.mark.parametrize(("operations", "on_a_cpu"), [(2, 6), (30, 5)])
def test_few_loops_to_compile_for_a_loop_without_a_bound(operations, on_a_cpu, device):
    """And none for the schedule. A step of few operations has one loop to advance, and one to store.

    On a GPU, where loops begin late, one loop walks forward, and one evaluates again whatever a turn needs.
    """

    def step(x):
        for _ in range(operations):
            x = jnp.sin(x) * 0.9
        return x

    gradient = jax.jit(jax.grad(lambda x: lx.while_loop(lambda x: x > 0.1, step, x)))
    assert gradient.lower(1.0).as_text().count("stablehlo.while") == (on_a_cpu if device == "cpu" else 4)


def test_a_large_carry_is_written_only_where_it_is_to_be_stored_on_a_gpu():
    gradient = jax.jit(jax.grad(lambda x: lx.while_loop(lambda x: x[0] > 0.1, lambda x: jnp.sin(x) * 0.9, x).sum()))
    with lx.configure(calibration="h100"):
        assert gradient.lower(jnp.ones(2**18)).as_text().count("stablehlo.while") == 6


@pytest.mark.parametrize("is_known", [True, False])
def test_a_large_carry_is_stored_before_it_changes_on_a_gpu(is_known):
    """Where XLA is given an order, of numbers and of keys; with slots and a step that is taken in two loops."""

    def loss(x, n):
        take = lambda c: (jnp.sin(c[0]) + jax.random.uniform(c[1]), jax.random.split(c[1])[0], c[2] + 1)
        start = (x, jax.random.key(0), 0)
        if is_known:
            return lx.fori_loop(0, 20, lambda i, c: take(c), start, kind=lx.Checkpointed(3))[0].sum()
        return lx.while_loop(lambda c: c[2] < n, take, start, kind=lx.Checkpointed(3))[0].sum()

    x = jnp.linspace(0, 1, 2**17)
    expected = jax.jit(jax.grad(loss))(x, 20)
    with lx.configure(calibration="h100"):
        gradient = jax.jit(jax.grad(loss))
        assert "optimization_barrier" in gradient.lower(x, 20).as_text()
        np.testing.assert_allclose(gradient(x, 20), expected)


@pytest.mark.parametrize("checkpoints", [3, 40])
def test_a_turn_copies_no_table(checkpoints):
    """What is known of all segments: XLA on a CPU would copy it, where rows are read after others are written."""
    gradient = jax.jit(
        jax.grad(lambda x: lx.fori_loop(0, 999, lambda i, x: jnp.sin(x), x, kind=lx.Checkpointed(checkpoints)))
    )
    lines = (gradient.lower(1.0).compile().as_text() or "").splitlines()
    tables = [line for line in lines if f"u32[{checkpoints + 1},3]" in line]
    assert any("dynamic-update-slice" in line for line in tables)
    assert not [line for line in tables if " copy(" in line]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("lanes", [False, True])
def test_every_order_of_a_loop_without_a_bound(lanes):
    """Whose carries are stored in slots out of order, and whose residuals depend on the row.

    Where it ends, a carry may be due or not.
    """

    def loop(kind, max_steps=None):
        def function(x, n):
            body = lambda c: (c[0] + 1, c[1] + 0.1 * jnp.sin(c[1] + c[0]), c[2])
            return lx.while_loop(lambda c: c[0] < c[2], body, (0, x, n), kind=kind, max_steps=max_steps)[1]

        over = jax.vmap if lanes else lambda f: f
        first = lambda x, n: over(function)(x, n).sum()
        return jax.jit(
            lambda x, n: (first(x, n), jax.grad(first)(x, n), jax.grad(lambda x: jax.grad(first)(x, n).sum())(x))
        )

    found, expected = loop(lx.Checkpointed(4)), loop(lx.Residuals(), 256)
    for n in (0, 1, 23, *range(60, 75), 200):
        start = (jnp.array([0.3, -0.4, 0.7]), jnp.array([0, n // 2, n])) if lanes else (0.3, n)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), found(*start), expected(*start))


def test_two_levels_where_the_checkpoints_allow_for_them():
    """64 checkpoints for 1000 steps: 32 blocks of 32 steps, within 2 % of the optimum."""
    evaluated = count_evaluations(lambda count, x: known(large, count, x, 1000, 64))
    assert evaluations(1000, 64) < evaluated <= 1.02 * evaluations(1000, 64)
    # Small residuals: each step is evaluated twice, but for the last ones, whose residuals are stored at once.
    assert count_evaluations(lambda count, x: known(small, count, x, 1000, 64)) == 1960


def product(counter, h):
    """A step that costs more than storing its residuals, which are as large as its carry."""
    return jnp.tanh(WEIGHTS @ h.at[0].set(counter(h[0])))


# The last: room for the residuals of all steps, which take a little more than a carry.
FORWARD = [(1000, 500, 1.5), pytest.param(1000, 64, 1.965, marks=pytest.mark.slow), (100, 103, 1.0)]


@pytest.mark.parametrize(("steps", "checkpoints", "optimum"), FORWARD)
def test_residuals_of_the_last_steps_are_stored_on_the_way_forward(steps, checkpoints, optimum):
    counter = Counter()
    gradient = jax.grad(lambda h: known(product, counter, h, steps, checkpoints).sum())
    assert counter.of(jax.jit(gradient), STATE) <= (1.01 * optimum if optimum > 1 else 1) * steps


@EACH_STEP
def test_but_not_where_the_bound_may_be_far_above_the_steps_that_are_taken(step):
    counter = Counter()
    with_known = jax.jit(jax.grad(lambda x, n: known(step, counter, x, n, 64, bound=1000)))
    with_unknown = jax.jit(jax.grad(lambda x, n: unknown(step, counter, x, n, 64, bound=1000)))
    for n in (50, 100, 1000):
        best = evaluations(n, 64, RECORDS[step])
        assert counter.of(with_known, 1.0, n) == best
        assert counter.of(with_unknown, 1.0, n) == best


def test_records_of_a_run_are_those_of_their_rows():
    """A step whose residual depends on its index, replayed several at a time."""
    loop = lambda kind: lambda x: lx.fori_loop(0, 30, lambda i, x: x + 0.1 * jnp.sin(x + i), x, kind=kind)
    found, expected = (jax.jit(jax.grad(loop(kind)))(0.3) for kind in (lx.Checkpointed(3), lx.Residuals()))
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


def test_records_take_room_in_leaves_of_their_type():
    """The carry has an integer before the number whose residual a replay stores."""
    body = lambda _, carry: (carry[0] + 1, carry[1] + 0.1 * jnp.sin(carry[1] + carry[0]))
    loop = lambda kind: lambda x: lx.fori_loop(0, 30, body, (0, x), kind=kind)[1]
    found, expected = (jax.jit(jax.grad(loop(kind)))(0.3) for kind in (lx.Checkpointed(3), lx.Residuals()))
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


def test_more_checkpoints_than_steps():
    """No step is evaluated again but for its derivative, and no more is stored than there are steps."""
    counter = Counter()
    gradient = jax.jit(jax.grad(lambda x, n: known(small, counter, x, n, 8, bound=8)))
    for steps in (7, 8):
        assert counter.of(gradient, 1.0, steps) == 2 * steps
    assert carries(lx.Checkpointed(10**6), 100) == carries(lx.Bounded(), 100)
