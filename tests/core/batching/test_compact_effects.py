"""`Compact`: errors, effects, keys and infos are those of each lane, and what is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.core.batching.logistic import COMPACT, N
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
