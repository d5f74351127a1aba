"""Branches that are not taken, alone and in the body of a loop: no iteration, no error, no effect and no NaN."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.progress_recorder import recorder
from tests.support.reference import assert_close

__all__ = ["recorder"]  # a fixture

COMPACT = lx.Compact(min_lanes=1)
each_lanes = pytest.mark.parametrize("lanes", ["lockstep", COMPACT], ids=str)


# ---- branches that are not taken


@each_lanes
def test_a_loop_that_does_not_end_in_a_branch_not_taken(lanes: Any) -> None:
    """The program of jax#2947."""

    def f(x: Any) -> Any:
        closer = lambda x: lax.while_loop(lambda y: y > 3.5, lambda y: (y + 3.2) / 2, x)
        away = lambda x: lax.while_loop(lambda y: y < 3.0, lambda y: y * 2.0, x)  # not from zero or below
        return lx.cond(x > 3.5, closer, lambda x: lx.cond(x > 0, away, lambda x: x, x), x, lanes=lanes)

    found = jax.jit(jax.vmap(f))(jnp.array([0.0, -1.0, 1.0, 100.0]))
    assert_close(found[:3], jnp.array([0.0, -1.0, 4.0]))
    assert 3.2 < found[3] <= 3.5


@each_lanes
@pytest.mark.parametrize("taken", [[True, False, True], [False] * 3], ids=["by some", "by none"])
def test_effects_of_a_branch_not_taken(lanes: Any, taken: list[bool]) -> None:
    seen: list[float] = []

    def heard(x: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return 2 * x

    run = jax.vmap(lambda p, x: lx.cond(p, heard, lambda x: x, x, lanes=lanes))
    xs = np.array([1.0, 2.0, 3.0])
    found = jax.jit(run)(np.array(taken), xs)
    jax.effects_barrier()
    assert sorted(seen) == list(xs[np.array(taken)])
    assert_close(found, jnp.where(jnp.array(taken), 2 * xs, xs))


@each_lanes
def test_an_error_in_a_branch_not_taken(lanes: Any) -> None:
    def checked(x: Any) -> Any:
        return eqx.error_if(jnp.sqrt(x), x < 0, "negative")

    run = jax.jit(jax.vmap(lambda p, x: lx.cond(p, checked, lambda x: x, x, lanes=lanes)))
    xs = np.array([4.0, -1.0])
    assert_close(run(np.array([True, False]), xs), jnp.array([2.0, -1.0]))
    assert_close(run(np.array([False, False]), xs), jnp.array([4.0, -1.0]))
    with pytest.raises(Exception, match="negative"):
        run(np.array([True, True]), xs)


@each_lanes
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eagerly"])
def test_nan_in_a_branch_not_taken(lanes: Any, jit: Any) -> None:
    run = jit(jax.vmap(jax.value_and_grad(lambda x: lx.cond(x > 0, jnp.log, lambda x: 2 * x, x, lanes=lanes))))
    for xs in ([1.0, -1.0], [-1.0, -2.0]):
        with jax.debug_nans(True):
            value, slope = run(np.array(xs))
        assert_close(value, jnp.array([0.0 if x > 0 else 2 * x for x in xs]))
        assert_close(slope, jnp.array([1 / x if x > 0 else 2.0 for x in xs]))


# ---- branches in the body of a loop, and loops that report in a branch

LENGTHS = np.array([1, 4, 0, 3])


@each_lanes
def test_a_branch_in_a_loop_is_taken_by_lanes_that_take_the_step(lanes: Any) -> None:
    """A lane that has finished would take the branch that is heard, which goes on for ever from there."""
    seen: list[float] = []

    def heard(x: Any, n: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return lx.while_loop(lambda y: (y < 8.0) | ((n == 3) & (x == 10.0)), lambda y: y + 1.0, x)

    def lane(n: Any) -> Any:
        body = lambda i, x: lx.cond(i % 2 == 1, heard, lambda x, _: x + i, x, n, lanes=lanes)
        return lx.fori_loop(0, n, lambda i, x: body(i, x) - jnp.where(i == 3, 5.0, 0.0), 0.0)

    found = jax.jit(jax.vmap(lane))(LENGTHS)
    jax.effects_barrier()
    assert_close(found, jnp.array([0.0, 5.0, 0.0, 10.0]))
    assert sorted(seen) == [0.0, 0.0, 10.0]


def test_progress_of_a_loop_in_a_branch(recorder: Any) -> None:
    """It is shown where the branch is taken."""
    shown = lambda x: lx.fori_loop(0, 5, lambda _, x: x + 1.0, x, progress=True)
    run = jax.jit(lambda p, x: lx.cond(p, shown, lambda x: x, x))
    assert jax.block_until_ready(run(False, 1.0)) == 1.0
    assert not recorder.ended
    assert jax.block_until_ready(run(True, 1.0)) == 6.0
    assert len(recorder.ended) == 1
