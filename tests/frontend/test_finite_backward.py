"""The step whose derivative is not finite, by `finite=`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import loopax as lx
from tests.support.breaking_loops import LANES, RAISED
from tests.support.limited_loops import raises


def kinked(x: Any, bad: Any, n: Any = 6, **options: Any) -> Any:
    """A loop whose derivative is infinite in row `bad`."""

    @jax.custom_jvp
    def plain(x: Any, flag: Any) -> Any:
        return 1.5 * x

    @plain.defjvp
    def _(primals: Any, dots: Any) -> Any:
        x, flag = primals
        return 1.5 * x, dots[0] * jnp.where(flag, jnp.inf, 1.5)

    options = {"finite": True, **options}
    return lx.fori_loop(0, n, lambda i, x: plain(x, i == bad), x, **options)


@pytest.mark.parametrize("kind", ["auto", "checkpointed", "bounded", "residuals"])
def test_the_step_whose_derivative_breaks_is_named(kind: str) -> None:
    grad = jax.jit(jax.grad(lambda x, bad: kinked(x, bad, kind=kind, max_steps=6)))
    np.testing.assert_allclose(grad(2.0, 9), 1.5**6)
    for bad in (0, 3, 5):
        with raises(RAISED, "loopax.fori_loop at", f"in reverse mode, step {bad} (the first is 0) made a cotangent"):
            jax.block_until_ready(grad(2.0, bad))
    lazy = jax.jit(jax.grad(lambda x, bad: kinked(x, bad, kind=kind, max_steps=6, throw=False)))
    assert lazy(2.0, 3) == jnp.inf


@pytest.mark.parametrize("lanes", LANES)
def test_the_lane_whose_derivative_breaks_is_named(lanes: str) -> None:
    grad = jax.jit(jax.vmap(jax.grad(lambda x, bad, n: kinked(x, bad, n, lanes=lanes)), in_axes=(None, 0, 0)))
    n = jnp.array([6, 3, 5, 0])
    np.testing.assert_allclose(grad(2.0, jnp.array([9, 4, 8, 0]), n), 1.5 ** np.asarray(n))
    with raises(RAISED, "step 4 (the first is 0) made a cotangent", "First at index 2 of the batch."):
        jax.block_until_ready(grad(2.0, jnp.array([9, 4, 4, 0]), n))


def test_the_outermost_loop_looks_at_cotangents() -> None:
    def nested(x: Any, outer: Any, bad: Any, **options: Any) -> Any:
        step = lambda i, x: kinked(x, jnp.where(i == outer, bad, 9), 3)
        return lx.fori_loop(0, 4, step, x, **options)

    for options in ({}, {"finite": True}):
        grad = jax.jit(jax.grad(partial(nested, **options)))
        np.testing.assert_allclose(grad(2.0, 9, 9), 1.5**12)
        with raises(RAISED, "in reverse mode, step 2 (the first is 0) made a cotangent"):
            jax.block_until_ready(grad(2.0, 2, 1))
    hessian = jax.jit(jax.hessian(lambda x, bad: kinked(x, bad) ** 2))
    np.testing.assert_allclose(hessian(2.0, 9), 2 * 1.5**12)


def test_a_gradient_in_a_step_tells_the_row() -> None:
    def train(bad: Any) -> Any:
        return lx.fori_loop(0, 4, lambda i, x: x - 1e-3 * jax.grad(kinked)(x, jnp.where(i == 2, bad, 9)), 2.0)

    jax.jit(train)(9)
    with raises(RAISED, "in reverse mode, step 1 (the first is 0), in row 2 of the loop around it made a cotangent"):
        jax.block_until_ready(jax.jit(train)(1))


def test_cotangents_that_are_not_finite_at_the_start_are_nobodys_fault() -> None:
    _, pull = jax.vjp(lambda x: kinked(x, 9), 2.0)
    assert jnp.isnan(pull(jnp.nan)[0])


@jax.custom_jvp
def kink(x: Any, flag: Any) -> Any:
    """Its derivative is infinite where the flag is True."""
    return 1.0 * x


@kink.defjvp
def _kink_jvp(primals: Any, dots: Any) -> Any:
    return kink(*primals), dots[0] * jnp.where(primals[1], jnp.inf, 1.0)


@pytest.mark.parametrize("product", [lambda w, x: w @ x, lambda w, x: x @ w])
def test_of_large_sums_the_factors_are_looked_at(product: Any) -> None:
    """The cotangent of the carry has no part in it."""

    def value(w: Any, bad: Any) -> Any:
        step = lambda i, x: x + kink(product(w, jax.lax.stop_gradient(x)), i == bad)
        return jnp.sum(lx.fori_loop(0, 5, step, jnp.ones(40), finite=True))

    grad = jax.jit(jax.grad(value))
    grad(jnp.eye(40) / 9, 9)
    with raises(RAISED, "in reverse mode, step 3 (the first is 0) made a cotangent"):
        jax.block_until_ready(grad(jnp.eye(40) / 9, 3))


def test_cotangents_of_constants_are_looked_at() -> None:
    def value(w: Any, table: Any, bad: Any) -> Any:
        step = lambda i, x: x + jnp.sqrt(jnp.where(i == bad, 0 * w[0], w[0])) + table[i]
        return lx.fori_loop(0, 5, step, 0.0, finite=True)

    grad = jax.jit(jax.grad(value, argnums=(0, 1)))
    table = jnp.zeros(5)
    grad(jnp.ones(2), table, 9)
    with raises(RAISED, "in reverse mode, step 3 (the first is 0) made a cotangent"):
        jax.block_until_ready(grad(jnp.ones(2), table, 3))


def test_gradients_on_devices_are_looked_at() -> None:
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    loss = lambda w, x: jax.lax.psum(jnp.sum(lx.fori_loop(0, 3, lambda i, x: x * w, x, finite=True)), "i")
    value = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    np.testing.assert_allclose(jax.jit(jax.grad(value))(2.0, jnp.ones(4)), 4 * 3 * 2.0**2)


def test_cotangents_that_overflow_are_found_in_their_step() -> None:
    grow = lambda x, w: lx.fori_loop(0, 4, lambda i, x: x * w, x, finite=True)
    for n in (3, 3000):
        with raises(RAISED, "in reverse mode, step 2 (the first is 0) made a cotangent"):
            x = jnp.zeros(n, jnp.float32)
            jax.block_until_ready(jax.jit(jax.grad(lambda x, w: jnp.sum(grow(x, w))))(x, jnp.float32(1e20)))
