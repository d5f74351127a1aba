"""A batch is one display, however its lanes run, and each device has one of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import loopax as lx
from tests.support.progress_recorder import both, counted, once, powers, recorder, same, summed

__all__ = ["recorder"]  # a fixture


def test_a_batch_is_shown_as_one(recorder):
    same(both(lambda progress: jax.vmap(lambda n: counted(n, progress)), np.array([5, 35, 12, 0])))
    once(recorder, 35, -1)
    assert recorder.lanes == [3, 2, 1, 1]


def test_lanes_of_lanes(recorder):
    ns = np.array([[5, 35], [12, 0]])
    jax.block_until_ready(jax.jit(jax.vmap(jax.vmap(lambda n: counted(n, True))))(ns))
    once(recorder, 35, -1)
    assert recorder.lanes == [3, 2, 1, 1]


def test_lanes_that_take_the_same_steps(recorder):
    xs = np.linspace(0.0, 1.0, 5)
    jax.block_until_ready(jax.jit(jax.vmap(powers(35, True)))(xs))
    once(recorder, 35)
    assert set(recorder.lanes) == {-1}


@pytest.mark.parametrize("loop", [counted, summed])
def test_compact_lanes_are_one_display(recorder, loop):
    ns = np.array([3, 35, 4, 6, 2, 5, 30, 1])
    lanes = lx.Compact(shrink=3, min_lanes=2)
    same(both(lambda progress: jax.vmap(lambda n: loop(n, progress, lanes=lanes)), ns))
    (parts,) = {parts for _, _, parts, _ in recorder.begun}
    assert len(recorder.begun) == len(recorder.ended) == parts > 1
    if loop is counted:
        assert sum(steps for _, steps in recorder.ended) == 35


@pytest.mark.parametrize("lanes", ["lockstep", pytest.param("compact", marks=pytest.mark.slow)])
def test_a_batch_in_jax_checkpoint(recorder, lanes):
    options: dict[str, Any] = {"lanes": lx.Compact(min_lanes=2)} if lanes == "compact" else {}

    def loop(x, n):
        keep = lambda c: c[0] < n
        step = lambda c: (c[0] + 1, jnp.sin(c[1] * x))
        return lx.while_loop(keep, step, (0, x), max_steps=64, progress=True, **options)[1]

    def value(xs, ns):
        return jnp.sum(jax.checkpoint(jax.vmap(loop))(xs, ns))

    xs, ns = np.linspace(0.1, 0.9, 4), np.array([3, 35, 7, 20])
    jax.block_until_ready(jax.jit(jax.value_and_grad(value))(xs, ns))
    assert len(recorder.ended) == recorder.begun[0][2]
    assert sum(steps for _, steps in recorder.ended) == 35


def test_lanes_with_large_constants_of_their_own(recorder):
    """Such a batch runs in stretches, with constants that are lent anew for each."""
    weights, ns = np.full((3, 100, 64), 0.01), np.array([5, 35, 12])

    def loop(progress):
        step = lambda w: lambda i, x: jnp.tanh(x @ w @ w.T)
        run = lambda w, n: lx.fori_loop(0, n, step(w), np.ones(100), progress=progress)
        return jax.jit(jax.vmap(run))(weights, ns)

    values = jax.block_until_ready(loop(True))
    once(recorder, 35)
    assert recorder.lanes == [3, 2, 1, 1]
    np.testing.assert_array_equal(values, loop(None))


def test_free_lanes(recorder):
    def value(n):
        def step(i, c):
            return lx.fori_loop(0, i, lambda j, c: jnp.sin(c), c + 1.0)

        return lx.fori_loop(0, n, step, 0.0, lanes="free", max_steps=8, progress=True)

    jax.block_until_ready(jax.jit(jax.vmap(value))(np.array([1, 4, 8])))
    ((_, iterations),) = recorder.ended
    assert iterations == sum(max(i, 1) for i in range(8))
    assert recorder.lanes[0] == 2


# ---- where programs run


def mesh(devices):
    return jax.make_mesh((devices,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))


ROWS = PartitionSpec("devices")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(recorder, check_vma):
    f = jax.shard_map(powers(25, True), mesh=mesh(4), in_specs=ROWS, out_specs=ROWS, check_vma=check_vma)
    xs = np.linspace(0.1, 0.8, 4)
    values = jax.jit(f)(xs)
    np.testing.assert_array_equal(values, jax.jit(jax.vmap(powers(25, None)))(xs))
    assert sorted(recorder.ended) == [(number, 25) for number in (1, 2, 3, 4)]
