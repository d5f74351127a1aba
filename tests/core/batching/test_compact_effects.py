"""`Compact`: errors, effects, keys and infos are those of each lane, and what is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import loopax as lx
from tests.core.batching.logistic import COMPACT, A, N, X, logistic, logistic_expected
from tests.support.reference import assert_close

EACH_FORM = pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])


@EACH_FORM
def test_a_finished_lane_leaves_its_domain_in_nobodys_sight(unknown):
    """sqrt(x - 0.5) after the end, and an error where the body is evaluated there."""
    starts = np.array([1.5, 10.2, 0.2, 5.5, 1.9])

    def f(x):
        n = jnp.where(x > 1.0, jnp.ceil(x - 1.0), 0).astype(int)

        def body(x):
            x = eqx.error_if(x, x < 0.5, "evaluated after the end")
            return x - 1.0 + 0.0 * jnp.sqrt(x - 0.5)

        if unknown:
            return lx.while_loop(lambda x: x > 1.0, body, x, max_steps=20, lanes=lx.Compact(2, 1))
        return lx.fori_loop(0, n, lambda _, x: body(x), x, max_steps=20, lanes=lx.Compact(2, 1))

    with jax.debug_nans(True):
        both = eqx.filter_jit(lambda x: (jax.vmap(jax.grad(f))(x), jax.grad(lambda x: jax.vmap(f)(x).sum())(x)))
        assert_close(both(starts), (np.ones(5), np.ones(5)))


def test_effects_of_lanes_happen_once(capfd):
    def f(n):
        def body(i, x):
            jax.debug.print("lane {n} step {i}", n=n, i=i)
            return x + 1.0

        return lx.fori_loop(0, n, body, 0.0, max_steps=4, lanes=lx.Compact(2, 1))

    jax.block_until_ready(jax.jit(jax.vmap(f))(np.array([2, 0, 1])))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == ["lane 1 step 0", "lane 2 step 0", "lane 2 step 1"]


def test_keys_are_those_of_the_steps():
    def f(key, n, lanes):
        draw = lambda x, key: x + jax.random.normal(key)
        return lx.while_loop(lambda x: jnp.abs(x) < n, draw, 0.0, key=key, max_steps=30, throw=False, lanes=lanes)

    keys, n = jax.random.split(jax.random.key(0), 6), np.array([1.0, 0.1, 3.0, 0.0, 2.0, 1.5])
    lanes = lambda how: jax.vmap(lambda key, n: f(key, n, how))
    compact, lockstep = jax.jit(lambda *args: (lanes(COMPACT)(*args), lanes("lockstep")(*args)))(keys, n)
    assert compact.tolist() == lockstep.tolist()


def test_info_and_limits_are_those_of_each_lane():
    def f(n):
        loop = lambda lanes: lx.while_loop(
            lambda i: i < n, lambda i: i + 1, 0, max_steps=5, throw=False, info=True, lanes=lanes
        )
        return loop(COMPACT), loop("lockstep")

    compact, lockstep = jax.jit(jax.vmap(f))(np.array([3, 9, 0, 5, 6]))
    assert jax.tree.map(lambda x: x.tolist(), compact) == jax.tree.map(lambda x: x.tolist(), lockstep)
    stopped = lambda n: lx.while_loop(lambda i: i < n, lambda i: i + 1, 0, max_steps=5, lanes=COMPACT)
    with pytest.raises(eqx.EquinoxRuntimeError, match="max_steps=5 stopped"):
        jax.block_until_ready(eqx.filter_jit(jax.vmap(stopped))(np.array([3, 9, 0])))


def test_without_jit():
    args = A[:4], X[:4], N[:4]
    with jax.disable_jit():
        assert_close(jax.vmap(jax.grad(logistic(COMPACT)))(*args), logistic_expected(*args)[1][0])


@EACH_FORM
def test_lanes_over_devices(unknown):
    """Each device has a batch of its own."""
    mesh = jax.make_mesh((2,), ("lanes",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("lanes")
    f = jax.vmap(logistic(COMPACT, unknown=unknown))
    # With `check_vma`, JAX refuses batches whose lengths vary over devices, in lockstep too.
    over_devices = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    a, x, n = (np.concatenate([v, v[:3]]) for v in (A, X, N))
    assert_close(jax.device_get(jax.jit(over_devices)(a, x, n)), logistic_expected(a, x, n)[0])


def test_collectives_over_the_lanes_are_refused():
    f = lambda n: lx.fori_loop(0, n, lambda _, x: x + jax.lax.psum(x, "lanes"), 0.0, lanes=COMPACT)
    with pytest.raises(NotImplementedError, match="communicates over the mapped axis 'lanes'"):
        jax.vmap(f, axis_name="lanes")(N)


def test_collectives_over_the_lanes_of_a_second_vmap_are_refused():
    f = lambda n: lx.fori_loop(0, n, lambda _, x: x + jax.lax.psum(x, "outer"), 0.0, lanes=COMPACT)
    with pytest.raises(NotImplementedError, match="communicates over the mapped axis 'outer'"):
        jax.vmap(jax.vmap(f), axis_name="outer")(N[:, None])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shrink": 1.5}, ValueError, "Compact(shrink=...): got 1.5, expected at least 2"),
        ({"shrink": float("nan")}, ValueError, "expected at least 2"),
        ({"shrink": "2"}, TypeError, "expected a number from 2 on"),
        ({"shrink": True}, TypeError, "expected a number from 2 on"),
        ({"min_lanes": 0}, ValueError, "Compact(min_lanes=...): got 0, expected at least 1"),
        ({"min_lanes": 2.5}, TypeError, "expected an int, the number of lanes"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error) as raised:
        lx.Compact(**options)
    assert message in str(raised.value)


def test_no_lanes():
    f = lambda x, n: lx.fori_loop(0, n, lambda _, x: jnp.sin(x), x, max_steps=3, lanes="compact")
    assert jax.vmap(jax.grad(f))(jnp.zeros(0), jnp.zeros(0, int)).shape == (0,)


def test_a_symbolic_batch_is_refused():
    (b,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((b,), dtype) for dtype in (A.dtype, X.dtype, N.dtype)]
    with pytest.raises(NotImplementedError, match="the batch has b lanes, a symbolic dimension"):
        export.export(jax.jit(jax.vmap(logistic(COMPACT))))(*shapes)
