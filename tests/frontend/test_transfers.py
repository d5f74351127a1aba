"""Loops outside of `jax.jit` move no constants to the device: JAX's guard against transfers lets them pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.compiled import compilations

ROWS = jnp.arange(4, dtype=jnp.float32) + 1
ONE, NUMBER, HOLDS, TEN = jnp.float32(1.5), jnp.int32(3), jnp.bool_(True), jnp.float32(10.0)
LANES = jnp.array([True, False, True, False])
KEY = jax.random.key(0)


def doubled(x, loops, **options):
    return loops.while_loop(lambda c: c < 10, lambda c: 2 * c, x, **options)


def summed(x, loops, **options):
    return loops.scan(lambda c, row: (c + row, c * row), x, ROWS, **options)


def chosen(x, loops, holds=HOLDS):
    return loops.cond(holds, lambda x: x + 1, lambda x: 2 * x, x)


AS_IN_LAX = {
    "while_loop": lambda loops: doubled(ONE, loops),
    "a condition that closes over an array": lambda loops: loops.while_loop(lambda c: c < TEN, lambda c: ONE * c, ONE),
    "scan, from the last row": lambda loops: summed(ONE, loops, reverse=True),
    "a batch of while_loop": lambda loops: jax.vmap(lambda x: doubled(x, loops))(ROWS),
    "jvp of while_loop": lambda loops: jax.jvp(lambda x: doubled(x, loops), (ONE,), (ONE,)),
    "vjp of scan": lambda loops: jax.vjp(lambda x: summed(x, loops)[0], ONE)[1](ONE),
}


@pytest.mark.parametrize("name", AS_IN_LAX)
def test_an_eager_loop_moves_nothing_where_lax_does_not(name):
    with jax.transfer_guard("disallow"):
        expected = AS_IN_LAX[name](lax)
        got = AS_IN_LAX[name](lx)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


OWN = {
    "max_steps": lambda: doubled(ONE, lx, max_steps=50),
    "info": lambda: doubled(ONE, lx, max_steps=1, info=True, throw=False),
    "keys": lambda: lx.while_loop(lambda c: c < 10, lambda c, key: 2 * c, ONE, key=KEY),
    "stop": lambda: summed(ONE, lx, stop=lambda c, y: c > 3),
    "rollout": lambda: lx.rollout(lambda state: (2 * state, state), ONE, 5),
    "a batch of cond": lambda: jax.vmap(lambda holds, x: chosen(x, lx, holds))(LANES, ROWS),
    "checkpointed kind": lambda: summed(ONE, lx, kind="checkpointed"),
    "compact lanes": lambda: jax.vmap(lambda x: doubled(x, lx, lanes="compact"))(ROWS),
    "sequential lanes": lambda: jax.vmap(lambda x: doubled(x, lx, lanes="sequential"))(ROWS),
}


@pytest.mark.parametrize("name", OWN)
def test_an_eager_loop_moves_nothing_for_what_lax_has_not(name):
    expected = OWN[name]()
    with jax.transfer_guard("disallow"):
        got = OWN[name]()
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_an_eager_batch_is_compiled_once():
    """Rules of transformations are traced and compiled for the first call; the second finds their program."""
    goes_on, step = lambda c: c < 10, lambda c: 3 * c

    def batch(x):
        return jax.vmap(lambda x: lx.while_loop(goes_on, step, x))(x)

    rows = ROWS + 1
    with compilations() as first:
        batch(ROWS)
    with compilations() as second:
        np.testing.assert_array_equal(batch(rows), [18, 27, 12, 15])
    assert first
    assert not second
