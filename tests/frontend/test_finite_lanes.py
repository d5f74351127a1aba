"""Lanes that end before a step of their own that breaks (`finite=`): in batches, free, and of items."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.breaking_loops import LANES, LOOPS, QUIET, RAISED, X, broken_at, fori, scan, while_


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("lanes", LANES)
def test_each_lane_ends_before_its_own(loop: Any, lanes: str) -> None:
    bad = jnp.array([9, 2, 0, 5, 9, 3, 9, 1], jnp.int32)
    n = jnp.array([6, 6, 3, 4, 0, 6, 5, 1], jnp.int32)
    x = jnp.arange(1.0, 25.0).reshape(8, 3)
    steps = np.minimum(bad, n)

    def run(bad: Any, n: Any, x: Any) -> Any:
        return loop(bad, x, n, lanes=lanes)

    last, info = jax.jit(jax.vmap(run))(bad, n, x)
    np.testing.assert_allclose(last, x * 1.5 ** steps[:, None])
    np.testing.assert_array_equal(info.num_steps, steps)
    np.testing.assert_array_equal(info.broken, bad < n)
    np.testing.assert_array_equal(info.broken_step, np.where(bad < n, bad, -1))

    value = lambda x: jnp.sum(jax.vmap(run)(bad, n, x)[0] ** 2)
    np.testing.assert_allclose(jax.jit(jax.grad(value))(x), 2 * x * 1.5 ** (2 * steps[:, None]))
    linear = jax.jit(lambda x: jax.linearize(lambda x: jax.vmap(run)(bad, n, x)[0], x)[1](x))
    np.testing.assert_allclose(linear(x), last)
    nested = jax.vmap(jax.vmap(run))
    two = jax.jit(nested)(*(a.reshape(2, 4, *a.shape[1:]) for a in (bad, n, x)))
    np.testing.assert_array_equal(two[0].reshape(8, 3), last)


@pytest.mark.parametrize("kind", ["checkpointed", "bounded", "residuals"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lanes", ["lockstep", lx.Compact(min_lanes=1, shrink=2)])
def test_no_row_of_a_batch_is_beyond_what_its_lanes_take(lanes: Any, reverse: bool, kind: Any) -> None:
    """A step that all lanes break is not there for derivatives, which would have its NaN in what it multiplies."""

    def rows(xs: Any, bad: Any, n: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            i, v = c
            v = jnp.where(i == bad, jnp.nan, jnp.sin(v))
            return (i + 1, v), v * x

        start = (jnp.int32(0), jnp.float64(0.5))
        return lx.scan(step, start, xs, n, kind=kind, lanes=lanes, reverse=reverse, **QUIET)[1]

    xs, of_batch = jnp.arange(1.0, 5.0), jax.vmap(jax.vmap(rows, (None, 0, 0)), (None, 0, 0))
    in_batch = jax.jit(jax.grad(lambda *of: jnp.sum(of_batch(*of))))
    alone = jax.jit(jax.grad(lambda *of: jnp.sum(rows(*of))))
    for bad, n in [((0, 0), (4, 4)), ((2, 2), (4, 4)), ((0, 3), (4, 4)), ((3, 1), (4, 2)), ((0, 0), (4, 0))]:
        expected = 2 * sum(alone(xs, *map(jnp.int32, of)) for of in zip(bad, n, strict=True))
        lanes_of = (jnp.array([x, x[::-1]], jnp.int32) for x in (bad, n))
        np.testing.assert_allclose(in_batch(xs, *lanes_of), expected)


def test_a_batch_of_gradients_of_a_loop_without_a_bound() -> None:
    """No carry is saved at a row that no lane takes: the way back would begin there."""

    def last(x: Any, bad: Any) -> Any:
        body = lambda c: (c[0] + 1, broken_at(bad)(c[1], c[0]))
        return jnp.sum(lx.while_loop(lambda c: c[0] < 6, body, (jnp.int32(0), x), **QUIET)[1] ** 2)

    grads = jax.jit(jax.vmap(jax.grad(last), (0, None)))
    for bad in (0, 2, 9):
        found = grads(jnp.stack([X, 2 * X]), bad)
        np.testing.assert_allclose(found, 2 * jnp.stack([X, 2 * X]) * 1.5 ** (2 * min(bad, 6)))


def test_many_lanes_in_stages_end_before_their_own() -> None:
    bad = jnp.arange(64, dtype=jnp.int32) * 7 % 13
    n = jnp.arange(64, dtype=jnp.int32) * 5 % 11
    x = jnp.ones((64, 3))
    run = jax.jit(jax.vmap(lambda bad, n, x: while_(bad, x, n, lanes="compact")))
    last, info = run(bad, n, x)
    np.testing.assert_allclose(last, 1.5 ** np.minimum(bad, n)[:, None] * x)
    np.testing.assert_array_equal(info.broken_step, np.where(bad < n, bad, -1))


@pytest.mark.parametrize("loop", LOOPS)
def test_items_end_before_their_own(loop: Any) -> None:
    bad, x = jnp.array([0, 2, 9, 5, 1, 3], jnp.int32), jnp.arange(1.0, 19.0).reshape(6, 3)
    options = {"max_steps": 8} if loop is not scan else {}

    @jax.jit
    def run(x: Any) -> Any:
        return lx.lanes_map(lambda of: loop(*of, **options), (bad, x), num_lanes=2)

    last, info = run(x)
    steps = np.minimum(bad, 6)
    np.testing.assert_allclose(last, x * 1.5 ** steps[:, None])
    np.testing.assert_array_equal(info.num_steps, steps)
    np.testing.assert_array_equal(info.broken_step, np.where(bad < 6, bad, -1))
    assert not np.any(info.limit_reached)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(run(x)[0] ** 2))(x), 2 * x * 1.5 ** (2 * steps[:, None]))
    with pytest.raises(RAISED, match=r"step 2 \(the first is 0\) made carry.*\[1\] NaN; it was 11.25 before"):
        jax.block_until_ready(lx.lanes_map(lambda x: loop(2, x, throw=True), x[1:2], num_lanes=1))


def test_an_item_of_a_stream_says_which_step_broke() -> None:
    items = [(jnp.int32(bad), X) for bad in (9, 2, 4)]
    stream = lx.lanes_stream(
        lambda of: fori(*of, throw=True)[0], items, num_lanes=2, throw=False, info=True, ordered=True
    )
    found = [(result, info) for _, (result, info) in stream]
    np.testing.assert_allclose([last for last, _ in found], [X * 1.5**steps for steps in (6, 2, 4)])
    assert [info.num_steps for _, info in found] == [6, 2, 4]
    assert found[0][1].error is None
    assert "step 4 (the first is 0) made carry[1] NaN; it was 5.0625 before" in str(found[2][1].error)


@pytest.mark.parametrize("looks", ["inner", "outer"])
def test_free_lanes_end_before_their_own(looks: str) -> None:
    """Of the inner loop, one step of an outer step breaks; of the outer one, what stands after the inner loop."""

    def nested(bad: Any, x: Any, n: Any, lanes: Any) -> Any:
        quiet: dict[str, Any] = {**QUIET, "info": True}

        def outer(i: Any, c: Any) -> Any:
            step = lambda j, x: broken_at(bad if looks == "inner" else -1)(x, 10 * i + j)
            x, broken = lx.fori_loop(0, i % 3 + 1, step, c[0], max_steps=4, **quiet)
            return broken_at(bad if looks == "outer" else -1)(x / 1.5, i), c[1] + broken.broken_step

        return lx.fori_loop(0, n, outer, (x, jnp.int32(0)), max_steps=6, lanes=lanes, **quiet)

    bad = jnp.array([11, 20, 0, 99] if looks == "inner" else [1, 2, 0, 99], jnp.int32)
    x, n = jnp.arange(1.0, 13.0).reshape(4, 3), jnp.array([5, 3, 2, 4], jnp.int32)
    results = {}
    for lanes in ("lockstep", "free"):
        run = jax.vmap(partial(nested, lanes=lanes))
        found = jax.jit(run)(bad, x, n)
        grad = jax.jit(jax.grad(lambda x, run=run: jnp.sum(run(bad, x, n)[0][0] ** 2)))(x)
        results[lanes] = found, grad
    jax.tree.map(np.testing.assert_allclose, results["free"], results["lockstep"])
