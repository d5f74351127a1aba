"""The adaptive solver of the examples is Diffrax's in values, gradients and steps, lane by lane."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double_precision")]

STIFFNESS = jnp.array([1.0, 4.0, 12.0])
TIMES = jnp.array([0.0, 0.05, 0.1, 0.15, 2.0, 5.5, 6.0])  # several in a step, and steps without any
START = jnp.array([2.0, 0.0])


def loss_and_solution(solver, stiffness, y):
    solution = solver(stiffness, y, TIMES)
    weights = jnp.linspace(0.3, 1.0, solution.ys.size).reshape(solution.ys.shape)
    return (weights * solution.ys**2).sum(), solution


def in_lanes(solver):
    of_lane = jax.value_and_grad(partial(loss_and_solution, solver), (0, 1), has_aux=True)
    return jax.jit(jax.vmap(of_lane, (0, None)))(STIFFNESS, START)


@pytest.mark.filterwarnings("ignore")
def test_equal_to_diffrax_in_each_kind_and_with_compact_lanes(example):
    ours = in_lanes(example.with_loopax)
    pytest.importorskip("diffrax")
    theirs = in_lanes(partial(example.with_diffrax, max_steps=256))
    assert ours[0][1].num_steps.tolist() == theirs[0][1].num_steps.tolist()
    assert len(set(ours[0][1].num_steps.tolist())) == 3  # lanes take steps of their own
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)

    for options in ({"kind": "bounded", "max_steps": 256}, {"max_steps": None, "lanes": "compact"}):
        found = in_lanes(partial(example.with_loopax, **options))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(ours), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)
