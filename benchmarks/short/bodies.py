"""Loop bodies of a few operations: what a step costs apart from its body shows in them."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


class Body(NamedTuple):
    """A step that is repeated, and the state before the first step."""

    name: str
    step: Callable[[Array], Array]
    start: Array


def two_flops() -> Body:
    """Return a body of a multiplication and an addition, whose derivative depends on the state."""
    return Body("two flops", lambda y: y - 1e-3 * y * y, jnp.float32(0.5))


def sines() -> Body:
    """Return a body of elementwise operations on 64 numbers."""
    return Body("64 sines", lambda y: 1.1 * jnp.sin(y) + 0.1, jnp.linspace(0.0, 1.0, 64, dtype=jnp.float32))


def perceptron() -> Body:
    """Return a body of two products with matrices."""
    wide, narrow = random(16, 64, scale=0.1), random(64, 16, scale=0.1)
    return Body("MLP 16-64-16", lambda y: y + 0.01 * jnp.tanh(y @ wide) @ narrow, random(16))


def random(*shape: int, scale: float = 1.0) -> Array:
    """Return normal numbers, always the same."""
    return jnp.asarray(scale * np.random.RandomState(0).randn(*shape), jnp.float32)
