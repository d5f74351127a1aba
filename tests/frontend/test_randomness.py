"""Dropout and other randomness: another mask at each step and in each lane, the same one in a replay."""

from collections import defaultdict
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import loopax as lx
from tests.support.reference import assert_close

STEPS, WIDTH, RATE = 6, 24, 0.25
DROPOUT = eqx.nn.Dropout(RATE)
KEY = jax.random.key(7)
ONES = jnp.ones(WIDTH)
REPLAYING: dict[str, Any] = {"two carries": lx.Checkpointed(2), "blocks": lx.Checkpointed(), "bounded": lx.Bounded()}
EACH_KIND = pytest.mark.parametrize("kind", [*REPLAYING.values(), "auto", "residuals"], ids=str)


def plain_dropout(x: Array, *, key: Array) -> Array:
    return jnp.where(jax.random.bernoulli(key, 1 - RATE, x.shape), x / (1 - RATE), 0.0)


EACH_DROPOUT = pytest.mark.parametrize("dropout", [DROPOUT, plain_dropout], ids=["equinox", "plain"])


def while_loop(dropout: Any, masks: Array, key: Array) -> Array:
    body = lambda c, key: (c[0] + 1, c[1].at[c[0]].set(dropout(ONES, key=key)))
    return lx.while_loop(lambda c: c[0] < STEPS, body, (0, masks), key=key)[1]


def fori_loop(dropout: Any, masks: Array, key: Array) -> Array:
    return lx.fori_loop(0, STEPS, lambda i, masks, key: masks.at[i].set(dropout(ONES, key=key)), masks, key=key)


def scan(dropout: Any, masks: Array, key: Array) -> Array:
    return lx.scan(lambda _, x, key: (None, dropout(ONES, key=key)), None, masks, key=key)[1]


@EACH_DROPOUT
@pytest.mark.parametrize("loop", [while_loop, fori_loop, scan])
def test_every_step_has_a_mask_of_its_own(loop: Any, dropout: Any) -> None:
    masks = jax.jit(partial(loop, dropout))(jnp.zeros((STEPS, WIDTH)), KEY)
    assert len({tuple(mask.tolist()) for mask in masks}) == STEPS
    assert_close(masks, jnp.stack([dropout(ONES, key=jax.random.fold_in(KEY, i)) for i in range(STEPS)]))


# A chain of dropouts multiplies its input by all masks, and so does its derivative.


def chain(x: Array, key: Array, n: Any, kind: Any = "auto", lanes: Any = "lockstep") -> Array:
    body = lambda i, x, key: DROPOUT(x, key=key)
    return lx.fori_loop(0, n, body, x, max_steps=STEPS, key=key, kind=kind, lanes=lanes)


def expected_chain(x: Array, key: Array, n: int) -> Array:
    for i in range(n):
        x = DROPOUT(x, key=jax.random.fold_in(key, i))
    return x


@EACH_KIND
def test_forward_and_backward_have_the_same_masks(kind: Any) -> None:
    run = lambda x: chain(x, KEY, jnp.int32(STEPS), kind).sum()
    value, gradient = jax.jit(jax.value_and_grad(run))(ONES)
    masks = expected_chain(ONES, KEY, STEPS)
    assert 0 < (masks != 0).sum() < WIDTH
    assert_close(value, masks.sum())
    assert_close(gradient, masks)


@pytest.mark.parametrize("kind", REPLAYING.values(), ids=REPLAYING)
def test_a_replayed_step_sees_the_mask_that_it_saw(kind: Any) -> None:
    """`jax.pure_callback` runs in replays, too; `jax.debug.callback` does not."""
    seen: dict[int, list[tuple[float, ...]]] = defaultdict(list)

    def record(i: Array, mask: Array) -> Array:
        seen[int(i)].append(tuple(mask.tolist()))
        return mask

    def body(i: Array, x: Array, key: Array) -> Array:
        mask = jax.pure_callback(record, ONES, i, DROPOUT(ONES, key=key))
        return jnp.sin(x) * mask

    jax.jit(jax.grad(lambda x: lx.fori_loop(0, STEPS, body, x, key=KEY, kind=kind).sum()))(ONES).block_until_ready()
    assert sorted(seen) == list(range(STEPS))
    assert sum(map(len, seen.values())) > STEPS  # some steps were replayed
    assert [len(set(masks)) for masks in seen.values()] == [1] * STEPS


@pytest.mark.parametrize("lanes", ["lockstep", lx.Compact(min_lanes=1)], ids=str)
def test_every_lane_draws_with_its_own_key(lanes: Any) -> None:
    keys, counts = jax.random.split(KEY, 4), jnp.array([STEPS, 0, 2, STEPS])
    run = jax.vmap(jax.value_and_grad(lambda x, key, n: chain(x, key, n, lanes=lanes).sum()), (None, 0, 0))
    values, gradients = jax.jit(run)(ONES, keys, counts)
    wanted = [expected_chain(ONES, key, int(n)) for key, n in zip(keys, counts, strict=True)]
    assert_close(values, jnp.stack([masks.sum() for masks in wanted]))
    assert_close(gradients, jnp.stack(wanted))
    assert not np.array_equal(gradients[0], gradients[3])


def test_lanes_that_share_a_key_share_their_masks() -> None:
    a, b = jax.vmap(lambda x: chain(x, KEY, STEPS))(jnp.stack([ONES, 2 * ONES]))
    assert_close(b, 2 * a)


MAKERS = {
    "typed": jax.random.key,
    "uint32": jax.random.PRNGKey,
    "numpy": lambda seed: np.asarray(jax.random.PRNGKey(seed)),
    "rbg": partial(jax.random.key, impl="rbg"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_kinds_of_keys(make: Any) -> None:
    key = make(3)
    gradient = jax.grad(lambda x: chain(x, key, STEPS, lx.Checkpointed(2)).sum())(ONES)
    assert_close(gradient, expected_chain(ONES, jnp.asarray(key), STEPS))


def test_inner_loops_draw_with_the_key_of_their_outer_step() -> None:
    inner = lambda j, x, key: DROPOUT(x, key=key)
    outer = lambda i, x, key: lx.fori_loop(0, 2, inner, x, key=key)
    actual = jax.grad(lambda x: lx.fori_loop(0, 2, outer, x, key=KEY, kind=lx.Checkpointed(1)).sum())(ONES)
    wanted = ONES
    for i in range(2):
        for j in range(2):
            wanted = DROPOUT(wanted, key=jax.random.fold_in(jax.random.fold_in(KEY, i), j))
    assert_close(actual, wanted)


@pytest.mark.parametrize("key", [7, "key", ONES, jax.random.split(KEY)], ids=["int", "str", "floats", "two keys"])
def test_what_is_not_a_key_is_an_error_that_says_how_to_make_one(key: Any) -> None:
    with pytest.raises(TypeError, match=r"fori_loop\(key=...\): got .*, expected one PRNG key. Make one with"):
        chain(ONES, key, STEPS)


def test_body_that_does_not_take_the_key() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'key'"):
        lx.fori_loop(0, 3, lambda i, x: x, ONES, key=KEY)
