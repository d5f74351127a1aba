"""Eight varied programs, to see whether `Auto` takes the fastest kind of gradient that fits."""

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import workloads
from benchmarks.short.bodies import random
from benchmarks.workloads import Workload


def heat() -> Workload:
    """A stencil on a grid: little arithmetic on much memory, and nearly linear."""

    def step(rate: Array, u: Array, _: None) -> Array:
        around = sum(jnp.roll(u, shift, axis) for shift in (-1, 1) for axis in (0, 1))
        return u + rate * (around - 4 * u) - 0.01 * u**3

    return Workload("Heat equation, 256 x 256, n = 200", step, jnp.float32(0.1), random(256, 256), None, 200, (0, 1))


def dense() -> Workload:
    """A large layer: much arithmetic on a small state."""
    step = lambda w, h, _: jnp.tanh(h @ w)
    weights, start = random(512, 512, scale=0.04), random(64, 512)
    return Workload("Dense 512, batch 64, n = 200", step, weights, start, None, 200, (0, 1))


def attention() -> Workload:
    """A transformer's layer as a fixed point: intermediate values much larger than the state."""

    def step(weights: list[Array], h: Array, _: None) -> Array:
        q, k, v, wide, narrow = (h @ w for w in [*weights[:3], weights[3], weights[3]])
        h = h + jax.nn.softmax(q @ k.T / 8.0) @ v
        return jnp.tanh(h + jax.nn.gelu(wide) * jnp.sin(narrow) @ weights[4])

    shapes = [(64, 64)] * 3 + [(64, 256), (256, 64)]
    weights = [random(*shape, scale=0.1) for shape in shapes]
    return Workload("Attention, 64 x 64, n = 300", step, weights, random(64, 64), None, 300, (0, 1))


def filtering() -> Workload:
    """A linear filter over many rows."""
    step = lambda a, h, x: a * h + x
    return Workload(
        "Linear filter, 32, n = 50000", step, jnp.full(32, 0.9), jnp.zeros(32), random(50_000, 32), 50_000, (0, 1)
    )


def rows_of_functions() -> Workload:
    """Costly elementwise functions of a state of middling size."""
    step = lambda a, h, _: jnp.sin(a * h) + 0.1 * jnp.exp(-(h**2)) * jnp.log1p(h**2)
    return Workload("Elementwise functions, 4096, n = 1000", step, jnp.float32(0.8), random(4096), None, 1000, (0, 1))


def programs() -> list[Workload]:
    """The eight."""
    return [
        workloads.lorenz(),
        workloads.perceptron(),
        workloads.recurrent(),
        heat(),
        dense(),
        attention(),
        filtering(),
        rows_of_functions(),
    ]
