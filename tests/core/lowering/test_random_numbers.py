"""Random numbers in loops on a CPU: those of JAX, without a loop for each draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.jax_internals import one_function


def draws(scan, lanes, shape=()):
    """Draws of several kinds in each step, in each of so many lanes; None: in a lane alone."""

    def f(key):
        def step(key, i):
            key, a, b = jax.random.split(key, 3)
            c = jax.random.fold_in(a, i)
            return key, (jax.random.normal(a, shape), jax.random.bits(b, (3,)), jax.random.randint(c, shape, 0, 9))

        key, ys = scan(step, key, jnp.arange(5), length=5)
        return jax.random.key_data(key), ys

    if lanes is None:
        return lambda: f(jax.random.key(3))
    return lambda: jax.vmap(f)(jax.random.split(jax.random.key(3), lanes))


@pytest.mark.parametrize("shape", [(), (7,), (0,), (5, 33)])
@pytest.mark.parametrize("lanes", [None, 1, 6])
def test_numbers_are_those_of_jax(lanes, shape):
    found, wanted = jax.jit(draws(lx.scan, lanes, shape))(), jax.jit(draws(jax.lax.scan, lanes, shape))()
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("flag", [True, False])
def test_numbers_are_those_of_jax_in_each_order_of_counters(flag):
    with jax.threefry_partitionable(flag):
        found, wanted = jax.jit(draws(lx.scan, 2))(), jax.jit(draws(jax.lax.scan, 2))()
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def loops(f):
    return jax.jit(f).lower().as_text().count("stablehlo.while")


def test_a_draw_is_no_loop():
    """Also after the same draw outside of the loop, for which JAX has made a function already."""
    before = jax.jit(lambda: jax.random.split(jax.random.key(3), 3)).lower().as_text().count("stablehlo.while")
    assert before > 0
    assert loops(draws(lx.scan, None)) == 1
    assert loops(draws(jax.lax.scan, None)) > 1

    def twice():
        keys = jax.random.split(jax.random.key(0), 3)
        f = lambda key, _: (jax.random.split(key, 3)[0], None)
        return jax.random.key_data(keys), jax.random.key_data(lx.scan(f, keys[0], None, 4)[0])

    assert loops(twice) == before + 1
    assert "stablehlo.popcnt" in jax.jit(twice).lower().as_text()  # of the condition around the rounds


def test_numbers_of_an_explicit_mesh():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        keys = jax.device_put(
            jax.random.split(jax.random.key(0), 8), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        )

        def f(key):
            draw = lambda i, x: x + jax.random.uniform(jax.random.fold_in(key, i))
            return lx.fori_loop(0, 3, draw, 0.0)

        found = np.asarray(jax.jit(jax.vmap(f))(keys))
    wanted = jax.vmap(lambda key: sum(jax.random.uniform(jax.random.fold_in(key, i)) for i in range(3)))
    np.testing.assert_allclose(found, wanted(jax.random.split(jax.random.key(0), 8)), rtol=1e-12)


@pytest.mark.skipif(not one_function.NEEDS_TELLING, reason="XLA makes such functions itself from jaxlib 0.12 on")
def test_a_step_that_splits_a_key_is_one_function():
    assert "xla_cpu_small_call" in jax.jit(draws(lx.scan, None)).lower().as_text()
