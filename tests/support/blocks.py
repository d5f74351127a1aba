"""A model as users write them, and loops of three steps, for the tests of models."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import loopax as lx

KEY = jax.random.key(0)
X = jnp.array([0.5, -1.0, 2.0])


class Block(eqx.Module):
    """A residual block as users write them: a size that is not marked static, a rate, a flag, a function."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable[[Array], Array]
    width: int

    def __init__(self, key: Array, rate: float = 0.25, inference: bool = True) -> None:
        self.linear = eqx.nn.Linear(3, 3, key=key)
        self.dropout = eqx.nn.Dropout(rate, inference)
        self.activation = jnp.tanh
        self.width = 3

    def __call__(self, x: Array, key: Array | None = None) -> Array:
        h = self.activation(self.linear(x)) + jnp.zeros(self.width)
        return x + self.dropout(h, key=key)

    def step(self, x: Array, row: Array) -> tuple[Array, Array]:
        return self(x + row), x


BLOCK = Block(KEY)
KEYS = jax.random.split(jax.random.key(1), 3)


def while_loop(step: Any, init: Any, **options: Any) -> Any:
    """Three steps."""
    return lx.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, init), max_steps=3, **options)[1]


def fori_loop(step: Any, init: Any, **options: Any) -> Any:
    return lx.fori_loop(0, 3, lambda _, c: step(c), init, **options)


def scan(step: Any, init: Any, **options: Any) -> Any:
    return lx.scan(lambda c, _: (step(c), None), init, length=3, **options)[0]


def python_loop(step: Any, init: Any) -> Any:
    for _ in range(3):
        init = step(init)
    return init


def apply(state: tuple[Any, Any]) -> tuple[Any, Any]:
    model, x = state
    return model, model(x)


def arrays(tree: Any) -> Any:
    return eqx.filter(tree, eqx.is_array)
