"""`key=`: fresh randomness at each step, the same when a step is replayed, and of its own in each lane."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close

KEYS = {"typed": jax.random.key, "raw": jax.random.PRNGKey}


def expected_draws(key, indices):
    return jnp.stack([jax.random.normal(jax.random.fold_in(key, i)) for i in indices])


@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
def test_scan_draws_by_row(make):
    key = make(3)
    step = lambda c, x, key: (c, jax.random.normal(key))
    for reverse in (False, True):
        _, ys = lx.scan(step, 0, jnp.arange(6), length=4, reverse=reverse, key=key)
        assert_close(ys, jnp.concatenate([expected_draws(key, range(4)), jnp.zeros(2)]))


@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
def test_fori_loop_draws_by_index(make):
    key = make(3)
    draws = lx.fori_loop(2, 5, lambda i, c, key: c.at[i].set(jax.random.normal(key)), jnp.zeros(6), key=key)
    assert_close(draws[2:5], expected_draws(key, range(2, 5)))


@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
def test_while_loop_draws_by_count(make):
    key = make(3)
    body = lambda c, key: (c[0] + 1, c[1].at[c[0]].set(jax.random.normal(key)))
    _, draws = lx.while_loop(lambda c: c[0] < 4, body, (0, jnp.zeros(4)), key=key, throw=False)
    assert_close(draws, expected_draws(key, range(4)))


def noisy(kind):
    def program(w, key, n):
        body = lambda i, h, key: jnp.tanh(w * h + jax.random.normal(key))
        return lx.fori_loop(0, n, body, jnp.ones(()), max_steps=9, key=key, kind=kind)

    return program


def noisy_expected(w, key, n):
    h = jnp.ones(())
    for i in range(int(n)):
        h = jnp.tanh(w * h + jax.random.normal(jax.random.fold_in(key, i)))
    return h


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_replays_draw_the_same(kind):
    key = jax.random.key(0)
    f = lambda w: noisy(kind)(w, key, jnp.int32(7))
    assert_close(jax.jit(jax.grad(f))(0.7), jax.grad(noisy_expected)(0.7, key, 7))
    assert_close(jax.jit(jax.hessian(f))(0.7), jax.hessian(noisy_expected)(0.7, key, 7))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_lanes_draw_with_keys_of_their_own(kind):
    keys, counts = jax.random.split(jax.random.key(0), 3), jnp.array([7, 0, 3])
    wanted = jnp.stack([jax.grad(noisy_expected)(0.7, k, n) for k, n in zip(keys, counts, strict=True)])
    assert_close(jax.jit(jax.vmap(jax.grad(noisy(kind)), (None, 0, 0)))(0.7, keys, counts), wanted)


def test_lanes_that_share_a_key_draw_the_same():
    key, counts = jax.random.key(0), jnp.array([7, 7])
    a, b = jax.vmap(noisy(lx.Auto()), (None, None, 0))(0.7, key, counts)
    assert a == b


def test_every_step_has_another_mask():
    _, masks = lx.scan(
        lambda c, x, key: (c, jax.random.bernoulli(key, 0.5, (64,))), 0, length=20, key=jax.random.key(1)
    )
    assert len({tuple(mask.tolist()) for mask in masks}) == 20


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_keys_in_the_carry(kind):
    def program(w, key):
        def body(i, carry):
            key, h = carry
            key, this = jax.random.split(key)
            return key, jnp.tanh(w * h + jax.random.normal(this))

        return lx.fori_loop(0, 5, body, (key, jnp.ones(())), kind=kind)

    def expected(w, key):
        h = jnp.ones(())
        for _ in range(5):
            key, this = jax.random.split(key)
            h = jnp.tanh(w * h + jax.random.normal(this))
        return key, h

    for make in KEYS.values():
        key = make(5)
        last, value = program(0.7, key)
        assert jax.typeof(last) == jax.typeof(key)
        assert_close(value, expected(0.7, key)[1])
        actual = jax.jit(jax.grad(lambda w, key=key: program(w, key)[1]))(0.7)
        assert_close(actual, jax.grad(lambda w, key=key: expected(w, key)[1])(0.7))
