"""A lane behaves as if it were alone: nothing happens for it after it has finished."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.problem import KINDS, WITH_LAX, name_of
from tests.support.reference import assert_close
from tests.support.slow import each_kind

STARTS = np.array([1.5, 10.2, 0.2])


def countdown(kind):
    """Leaves its domain one step after the end: sqrt(x - 0.5) at x <= 1."""
    return lambda x: lx.while_loop(
        lambda x: x > 1.0, lambda x: x - 1.0 + 0.0 * jnp.sqrt(x - 0.5), x, max_steps=20, kind=kind
    )


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_gradients_are_finite(kind):
    f = countdown(kind)
    summed = jax.grad(lambda x: jax.vmap(f)(x).sum())
    found = jax.jit(lambda x: (jax.vmap(jax.grad(f))(x), summed(x), jax.vmap(jax.hessian(f))(x)))(STARTS)
    assert_close(found, (np.ones(3), np.ones(3), np.zeros(3)))


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_no_nan_is_ever_computed(kind):
    with jax.debug_nans(True):
        jax.block_until_ready(jax.jit(jax.vmap(countdown(kind)))(STARTS))


@pytest.mark.parametrize("kind", each_kind(KINDS[1], KINDS[3]), ids=name_of)
def test_constants_of_lanes(kind):
    """Each lane has a constant that only its own states go with: sqrt(c - x)."""

    def f(x, c):
        body = lambda x: x + 1.0 + jnp.sqrt(c - x) * 0.1
        return lx.while_loop(lambda x: x < c - 1.0, body, x, max_steps=20, kind=kind)

    starts, limits = np.zeros(3), np.array([2.0, 9.0, 0.0])
    values, *gradient = np.transpose([alone_with_constant(c) for c in limits])
    inside = jax.vmap(jax.value_and_grad(f, (0, 1)))
    outside = jax.grad(lambda *args: jax.vmap(f)(*args).sum(), (0, 1))
    found = jax.jit(lambda *args: (inside(*args), outside(*args)))(starts, limits)
    assert_close(found, ((values, tuple(gradient)), tuple(gradient)))


def alone_with_constant(c):
    """The result of one lane, and its derivatives by the start and by the constant."""
    x, of_start, of_constant = 0.0, 1.0, 0.0
    while x < c - 1.0:
        slope = 0.05 / np.sqrt(c - x)
        x, of_start, of_constant = (
            x + 1.0 + np.sqrt(c - x) * 0.1,
            of_start * (1.0 - slope),
            of_constant * (1.0 - slope) + slope,
        )
    return x, of_start, of_constant


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_rows_beyond_a_lanes_length_are_not_read(kind):
    """Rows from the length on are not numbers."""
    rows = np.array([[1.0, np.nan, np.nan], [1.0, 2.0, 3.0], [np.nan] * 3])
    lengths = np.array([1, 3, 0])
    f = lambda xs, n: lx.scan(lambda c, x: (c + x**2, c), jnp.zeros(()), xs, length=n, kind=kind)[0]
    outside = jax.grad(lambda xs, n: jax.vmap(f)(xs, n).sum())
    found = jax.jit(lambda *args: (jax.vmap(jax.grad(f))(*args), outside(*args)))(rows, lengths)
    assert_close(found, (np.array([[2.0, 0, 0], [2, 4, 6], [0, 0, 0]]),) * 2)


def guarded(x, limit):
    """Raises from the state in which a lane ends."""

    def body(x):
        x = eqx.error_if(x, x > limit, "evaluated after the end")
        return x + 1.0

    return lx.while_loop(lambda x: x <= limit, body, x, max_steps=20)


def test_errors_of_finished_lanes_are_not_raised():
    starts, limits = jnp.zeros(3), jnp.array([2.0, 9.0, -1.0])
    summed = jax.grad(lambda x, limits: jax.vmap(guarded)(x, limits).sum())
    together = lambda *args: (jax.vmap(guarded)(*args), jax.vmap(jax.grad(guarded))(*args), summed(*args))
    found = eqx.filter_jit(together)(starts, limits)
    assert_close(found, (np.array([3.0, 10.0, 0.0]), np.ones(3), np.ones(3)))


LENGTHS, STOP_AT = np.array([10, 2, 0]), np.array([8.0, -1.0, -1.0])


def in_reverse(step, kind):
    """One lane stops before another starts: nothing is evaluated in between."""

    def f(xs, n, stop_at):
        body = lambda c, x: (step(c, x, stop_at), x)
        stop = lambda c, y: y <= stop_at
        return lx.scan(body, jnp.zeros(()), xs, length=n, reverse=True, stop=stop, kind=kind)

    return f


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_rows_in_which_no_lane_is_active(kind):
    step = lambda c, x, stop_at: eqx.error_if(c, x < stop_at, "evaluated after the end") + x
    carry, ys = eqx.filter_jit(jax.vmap(in_reverse(step, kind), (None, 0, 0)))(jnp.arange(10.0), LENGTHS, STOP_AT)
    assert carry.tolist() == [17.0, 1.0, 0.0]
    assert ys[0].tolist() == [0.0] * 8 + [8.0, 9.0]
