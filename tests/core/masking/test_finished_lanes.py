"""A lane behaves as if it were alone: nothing happens for it after it has finished."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.problem import KINDS, WITH_LAX, name_of
from tests.support.reference import assert_close

STARTS = jnp.array([1.5, 10.2, 0.2])


def countdown(kind):
    """Leaves its domain one step after the end: sqrt(x - 0.5) at x <= 1."""
    return lambda x: lx.while_loop(
        lambda x: x > 1.0, lambda x: x - 1.0 + 0.0 * jnp.sqrt(x - 0.5), x, max_steps=20, kind=kind
    )


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_gradients_are_finite(kind):
    f = countdown(kind)
    assert_close(jax.jit(jax.vmap(jax.grad(f)))(STARTS), jnp.ones(3))
    assert_close(jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(STARTS), jnp.ones(3))
    assert_close(jax.jit(jax.vmap(jax.hessian(f)))(STARTS), jnp.zeros(3))


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_no_nan_is_ever_computed(kind):
    with jax.debug_nans(True):
        jax.block_until_ready(jax.jit(jax.vmap(countdown(kind)))(STARTS))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_constants_of_lanes(kind):
    """Each lane has a constant that only its own states go with: sqrt(c - x)."""

    def f(x, c):
        body = lambda x: x + 1.0 + jnp.sqrt(c - x) * 0.1
        return lx.while_loop(lambda x: x < c - 1.0, body, x, max_steps=20, kind=kind)

    starts, limits = jnp.zeros(3), jnp.array([2.0, 9.0, 0.0])
    alone = [jax.value_and_grad(f, (0, 1))(x, c) for x, c in zip(starts, limits, strict=True)]
    wanted = jax.tree.map(lambda *values: jnp.stack(values), *alone)
    assert_close(jax.jit(jax.vmap(jax.value_and_grad(f, (0, 1))))(starts, limits), wanted)
    summed = jax.grad(lambda *args: jax.vmap(f)(*args).sum(), (0, 1))
    assert_close(jax.jit(summed)(starts, limits), wanted[1])


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_rows_beyond_a_lanes_length_are_not_read(kind):
    """Rows from the length on are not numbers."""
    rows = jnp.array([[1.0, jnp.nan, jnp.nan], [1.0, 2.0, 3.0], [jnp.nan] * 3])
    lengths = jnp.array([1, 3, 0])
    f = lambda xs, n: lx.scan(lambda c, x: (c + x**2, c), jnp.zeros(()), xs, length=n, kind=kind)[0]
    wanted = jnp.array([[2.0, 0, 0], [2, 4, 6], [0, 0, 0]])
    assert_close(jax.jit(jax.vmap(jax.grad(f)))(rows, lengths), wanted)
    assert_close(jax.jit(jax.grad(lambda xs: jax.vmap(f)(xs, lengths).sum()))(rows), wanted)


def guarded(x, limit):
    """Raises from the state in which a lane ends."""

    def body(x):
        x = eqx.error_if(x, x > limit, "evaluated after the end")
        return x + 1.0

    return lx.while_loop(lambda x: x <= limit, body, x, max_steps=20)


def test_errors_of_finished_lanes_are_not_raised():
    starts, limits = jnp.zeros(3), jnp.array([2.0, 9.0, -1.0])
    ends = jnp.array([3.0, 10.0, 0.0])
    assert_close(eqx.filter_jit(jax.vmap(guarded))(starts, limits), ends)
    assert_close(eqx.filter_jit(jax.vmap(jax.grad(guarded)))(starts, limits), jnp.ones(3))
    summed = lambda x: jax.vmap(guarded)(x, limits).sum()
    assert_close(eqx.filter_jit(jax.grad(summed))(starts), jnp.ones(3))


def test_the_error_of_an_active_lane_is_raised():
    def f(x):
        body = lambda x: eqx.error_if(x, x > 5.0, "too large") + 1.0
        return lx.while_loop(lambda x: x < 9.0, body, x, max_steps=20)

    assert eqx.filter_jit(jax.vmap(f))(jnp.array([9.0, 10.0])).tolist() == [9.0, 10.0]
    with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
        jax.block_until_ready(eqx.filter_jit(jax.vmap(f))(jnp.array([9.0, 0.0])))


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_rows_in_which_no_lane_is_active(kind):
    """In reverse, one lane stops before another starts: nothing is evaluated in between."""
    xs = jnp.arange(10.0)
    lengths = jnp.array([10, 2, 0])
    stop_at = jnp.array([8.0, -1.0, -1.0])

    def f(n, stop_at):
        step = lambda c, x: (eqx.error_if(c, x < stop_at, "evaluated after the end") + x, x)
        return lx.scan(step, jnp.zeros(()), xs, length=n, reverse=True, stop=lambda c, y: y <= stop_at, kind=kind)

    carry, ys = eqx.filter_jit(jax.vmap(f))(lengths, stop_at)
    assert carry.tolist() == [17.0, 1.0, 0.0]
    assert ys[0].tolist() == [0.0] * 8 + [8.0, 9.0]


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_gradient_over_such_rows(kind):
    lengths, stop_at = jnp.array([10, 2, 0]), jnp.array([8.0, -1.0, -1.0])

    def f(xs, n, stop_at):
        step = lambda c, x: (c + jnp.sqrt(x - stop_at + 1e-3), x)
        return lx.scan(step, jnp.zeros(()), xs, length=n, reverse=True, stop=lambda c, y: y <= stop_at, kind=kind)[0]

    rows = jnp.stack([jnp.arange(10.0)] * 3)
    actual = jax.jit(jax.vmap(jax.grad(f)))(rows, lengths, stop_at)
    alone = jnp.stack([jax.grad(f)(*lane) for lane in zip(rows, lengths, stop_at, strict=True)])
    assert jnp.isfinite(actual).all()
    assert_close(actual, alone)
