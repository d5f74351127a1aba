"""The adaptive solver of the examples is Diffrax's in values, gradients and steps, lane by lane."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.example_files import load_example

pytestmark = pytest.mark.slow

STIFFNESS = jnp.array([1.0, 4.0, 12.0])
TIMES = jnp.array([0.0, 0.05, 0.1, 0.15, 2.0, 5.5, 6.0])  # several in a step, and steps without any
START = jnp.array([2.0, 0.0])


@pytest.fixture(scope="module")
def example():
    return load_example("adaptive_ode")


def loss_and_solution(solver, stiffness, y):
    solution = solver(stiffness, y, TIMES)
    weights = jnp.linspace(0.3, 1.0, solution.ys.size).reshape(solution.ys.shape)
    return (weights * solution.ys**2).sum(), solution


def in_lanes(solver):
    of_lane = jax.value_and_grad(partial(loss_and_solution, solver), (0, 1), has_aux=True)
    return jax.jit(jax.vmap(of_lane, (0, None)))(STIFFNESS, START)


@pytest.fixture(scope="module")
def ours(example):
    return in_lanes(example.with_loopax)


def test_lanes_take_steps_of_their_own_and_save_all_times(ours):
    (_, solution), _ = ours
    assert len(set(solution.num_steps.tolist())) == 3
    assert solution.ys.shape == (3, 7, 2)
    np.testing.assert_array_equal(solution.ys[:, 0], jnp.broadcast_to(START, (3, 2)))


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
@pytest.mark.filterwarnings("ignore")
def test_equal_to_diffrax(example, ours):
    pytest.importorskip("diffrax")
    theirs = in_lanes(partial(example.with_diffrax, max_steps=256))
    assert ours[0][1].num_steps.tolist() == theirs[0][1].num_steps.tolist()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("options", [{"kind": "bounded", "max_steps": 256}, {"max_steps": None, "lanes": "compact"}])
def test_other_kinds_and_lanes(example, ours, options):
    for a, b in zip(
        jax.tree.leaves(in_lanes(partial(example.with_loopax, **options))), jax.tree.leaves(ours), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_finite_differences(example):
    """With a tolerance at which the sizes of the steps, which are not differentiated, hardly matter."""

    @jax.jit
    def loss(stiffness):
        options = {"first_step": 1e-3, "rtol": 1e-10, "atol": 1e-12, "max_steps": 2048}
        field = lambda t, y: example.van_der_pol(stiffness, y) + 0.1 * jnp.sin(t)
        return (example.solve(field, START, TIMES, **options).ys[:, 0] ** 2).sum()

    stiffness, h = 3.0, 1e-4
    difference = (loss(stiffness + h) - loss(stiffness - h)) / (2 * h)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(stiffness), difference, rtol=1e-6)


def test_a_solution_that_is_known(example):
    """`y' = -t y`: the time is that of the stage, between the steps too."""
    times = jnp.linspace(0.0, 2.0, 50)
    solution = example.solve(lambda t, y: -t * y, jnp.ones(1), times, first_step=0.01, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(solution.ys[:, 0], jnp.exp(-(times**2) / 2), rtol=1e-6)
    assert solution.num_steps < 50


def test_more_steps_than_the_bound(example):
    with pytest.raises(Exception, match="max_steps=5 stopped a loop"):
        example.with_loopax(1.0, START, TIMES, max_steps=5, kind=lx.Lax())
