"""`key=`: fresh randomness at each step, the same when a step is replayed, and of its own in each lane."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close

KEYS = {
    "typed": jax.random.key,
    "raw": jax.random.PRNGKey,
    "numpy": lambda seed: np.asarray(jax.random.PRNGKey(seed)),
}
EACH_KEY = pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)


@jax.jit
def nine_draws(key):
    return jax.lax.map(lambda i: jax.random.normal(jax.random.fold_in(key, i)), jnp.arange(9))


def expected_draws(key, indices):
    return np.asarray(nine_draws(key))[list(indices)]


@EACH_KEY
def test_each_loop_draws_by_row_index_or_count(make):
    key = make(3)
    for reverse in (False, True):
        draw = lambda c, x, key: (c, jax.random.normal(key))
        _, ys = lx.scan(draw, 0, np.arange(6), length=4, reverse=reverse, key=key)
        assert_close(ys, np.concatenate([expected_draws(key, range(4)), np.zeros(2)]))
    draws = lx.fori_loop(2, 5, lambda i, c, key: c.at[i].set(jax.random.normal(key)), jnp.zeros(6), key=key)
    assert_close(np.asarray(draws)[2:5], expected_draws(key, range(2, 5)))
    body = lambda c, key: (c[0] + 1, c[1].at[c[0]].set(jax.random.normal(key)))
    _, draws = lx.while_loop(lambda c: c[0] < 4, body, (0, jnp.zeros(4)), key=key, throw=False)
    assert_close(draws, expected_draws(key, range(4)))


def noisy(kind, lanes: Any = "lockstep"):
    def program(w, key, n):
        body = lambda i, h, key: jnp.tanh(w * h + jax.random.normal(key))
        return lx.fori_loop(0, n, body, jnp.ones(()), max_steps=9, key=key, kind=kind, lanes=lanes)

    return program


def noisy_expected(w, draws):
    """The result, and its first and second derivative."""
    h, slope, curvature = 1.0, 0.0, 0.0
    for draw in draws:
        h, before = np.tanh(w * h + draw), h
        first, inner = 1 - h**2, before + w * slope
        slope, curvature = first * inner, first * (2 * slope + w * curvature - 2 * h * inner**2)
    return h, slope, curvature


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_replays_draw_the_same(kind):
    f = noisy(kind)
    both = jax.jit(lambda *args: (jax.value_and_grad(f)(*args), jax.hessian(f)(*args)))
    for key in (jax.random.key(0), *([jax.random.key(0, impl="rbg")] if kind == KINDS[0] else [])):
        value, slope, curvature = noisy_expected(0.7, expected_draws(key, range(7)))
        assert_close(both(0.7, key, np.int32(7)), ((value, slope), curvature))


@pytest.mark.parametrize("kind", [*KINDS, "compact"], ids=name_of)
def test_lanes_draw_with_keys_of_their_own(kind):
    program = noisy(lx.Auto(), lx.Compact(min_lanes=1)) if kind == "compact" else noisy(kind)
    keys, counts = jax.random.split(jax.random.key(0), 3), np.array([7, 0, 3])
    draws = [expected_draws(key, range(n)) for key, n in zip(keys, counts, strict=True)]
    wanted = np.stack([noisy_expected(0.7, lane)[1] for lane in draws])
    assert_close(jax.jit(jax.vmap(jax.grad(program), (None, 0, 0)))(0.7, keys, counts), wanted)
