"""Kinds with checks and solvers of their own, and trace estimates, in a `jax.shard_map` that checks what varies."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from tests.support.reference import assert_close

W, XS = jnp.array(0.7), jnp.array([0.3, 0.5, 0.8, 0.1])


def leapfrog(w: Array, x: Any, num_steps: Any = 4, **options: Any) -> Array:
    def forward(i: Any, c: Any) -> Any:
        p = c[1] - 0.1 * jnp.sin(w * c[0])
        return c[0] + 0.1 * p, p

    def backward(i: Any, c: Any) -> Any:
        q = c[0] - 0.1 * c[1]
        return q, c[1] + 0.1 * jnp.sin(w * q)

    kind = lx.Reversible(backward, **options)
    return lx.fori_loop(0, num_steps, forward, (x, 0.1), max_steps=5, kind=kind)[0]


def taped(w: Array, x: Array) -> Array:
    kind = lx.Reversible(lambda i, c, before: before, record=lambda i, before, after: before)
    return lx.fori_loop(0, 3, lambda i, c: jnp.sin(w * c), x, kind=kind)


def contract(w: Array, x: Any, z: Array) -> Array:
    return 0.3 * jnp.tanh(w * z + x)


def until_small(w: Array, x: Any) -> Array:
    body = lambda c: (new := contract(w, x, c[0]), jnp.abs(new - c[0]))
    derivative = lx.Implicit(fixed_point=lambda c: c[0])
    return lx.while_loop(lambda c: c[1] > 1e-12, body, (0.0, jnp.inf), derivative=derivative)[0]


def by_residual(w: Array, x: Array) -> Array:
    derivative = lx.Implicit(fixed_point=lambda z: (z, z - contract(w, x, z)))
    return lx.fori_loop(0, 25, lambda i, z: contract(w, x, z), 0.0, derivative=derivative)


def estimate(w: Array, x: Array, estimator: Any, **options: Any) -> Array:
    """The probes differ between devices, the matrix that is closed over does not."""
    matrix = jnp.diag(jnp.arange(1.0, 6.0)) + 0.1
    key = jax.random.fold_in(jax.random.key(0), (10 * x).astype(int))
    found = lx.stochtrace.estimate_trace(
        lambda v: w * (matrix @ v) + x * v, key, estimator=estimator, size=5, **options
    )
    return found.value


SLOW = [pytest.mark.slow]
PROGRAMS: list[Any] = [
    pytest.param(leapfrog, id="reversible"),
    pytest.param(lambda w, x: leapfrog(w, 0.4, rtol=1e-9) * x, id="reversible, shared start"),
    pytest.param(taped, id="tape", marks=SLOW),
    pytest.param(
        lambda w, x: lx.fori_loop(0, 25, lambda i, z: contract(w, x, z), 0.0, derivative=lx.Implicit()), id="fori"
    ),
    pytest.param(until_small, id="while", marks=SLOW),
    pytest.param(by_residual, id="residual", marks=SLOW),
    pytest.param(lambda w, x: estimate(w, x, lx.stochtrace.Hutchinson(), rtol=0.1, max_matvecs=20), id="rtol"),
    pytest.param(lambda w, x: estimate(w, x, lx.stochtrace.XTrace(), num_matvecs=6), id="xtrace", marks=SLOW),
]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("f", PROGRAMS)
def test_gradients_in_a_shard_map(f: Callable[[Array, Array], Array], devices: int) -> None:
    """Of all devices' sum from outside, and of each device's own from inside; weights are shared."""
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    shared, spec = PartitionSpec(), PartitionSpec("d")

    def sharded(g: Callable[..., Any]) -> Callable[..., Any]:
        return jax.shard_map(jax.vmap(g, (None, 0)), mesh=mesh, in_specs=(shared, spec), out_specs=spec)

    lanes = jax.vmap(f, (None, 0))
    outside, inside = lambda w, xs: sharded(f)(w, xs).sum(), sharded(jax.grad(f, 1))
    found = jax.jit(lambda w, xs: (jax.grad(outside, (0, 1))(w, xs), inside(w, xs)))(W, XS)
    expected = jax.jit(jax.grad(lambda w, xs: lanes(w, xs).sum(), (0, 1)))(W, XS)
    assert_close(found, (expected, expected[1]), 1e-9)
