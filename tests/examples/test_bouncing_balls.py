"""The balls of the examples: both ways to run lanes, and the bounces of a ball without drag."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double_precision")]


@pytest.fixture(autouse=True)
def _strict(_user_precision):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def test_free_lanes_are_those_of_lockstep(example):
    balls, ledges = example.problem(balls=5, ledges=3, bounces=5)
    numbers = jnp.log(balls.drag), jax.scipy.special.logit(balls.restitution)

    def found(lanes):
        rows, info = jax.vmap(partial(example.fall, lanes=lanes))(ledges, balls)
        times = 1.01 * jax.lax.stop_gradient(rows.t)
        misfit = partial(example.misfit, lanes=lanes)
        return rows, jax.value_and_grad(misfit)(numbers, ledges, times, info.num_steps)

    ours, theirs = jax.jit(found, static_argnums=0)("free"), jax.jit(found, static_argnums=0)("lockstep")
    assert len(set(np.asarray(theirs[0].tries).sum(1).tolist())) > 1
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * float(jnp.abs(b).max()))


def test_without_drag_times_of_bounces_and_their_slopes_are_known(example):
    bounces = jnp.arange(5)

    def known(height, restitution):
        # The first fall, and twice as long a flight for each bounce, shorter by the restitution.
        flights = jnp.where(bounces == 0, 1.0, 2 * restitution ** bounces.astype(jnp.float64))
        return jnp.sqrt(2 * height / example.GRAVITY) * flights.cumsum()

    def found(height, restitution):
        ledges = jnp.zeros(5).at[0].set(height)
        return example.fall(ledges, example.Balls(jnp.zeros(()), restitution))[0].t

    def with_slopes(times):
        of_ball = lambda *ball: (times(*ball), jax.jacrev(times, (0, 1))(*ball))
        return jax.jit(jax.vmap(of_ball))(jnp.array([1.0, 9.0, 40.0]), jnp.array([0.9, 0.8, 0.7]))

    ours, theirs = with_slopes(found), with_slopes(known)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7)
