"""What the tests of NNX objects share: a module that changes in place, loops over it, and comparison."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import loopax as lx

KINDS = ["auto", lx.Checkpointed(), lx.Checkpointed(2), "bounded", "residuals", "lax"]
STEPS, SIZE = 4, 3
X = np.array([1.0, -0.5, 2.0])


class Cell(nnx.Module):
    """Weights that stay, and a counter, statistics and dropout that change."""

    def __init__(self, seed: Any = 0, rate: float = 0.5) -> None:
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(SIZE, SIZE, param_dtype=jnp.float64, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(0))
        self.mean = nnx.BatchStat(jnp.float64(0))
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean()
        return x + 0.1 * self.dropout(jnp.tanh(self.linear(x))) + self.mean[...]


class Counter(nnx.Module):
    """The smallest module."""

    def __init__(self, start: Any = 0) -> None:
        self.count = nnx.Variable(jnp.int32(start))


class Tied(nnx.Module):
    """Two names for one Variable, and an object that holds its owner."""

    def __init__(self) -> None:
        self.a = nnx.Param(jnp.float64(1))
        self.b = self.a
        self.cycle = nnx.List([self])


def apply(carry: tuple[Any, Any]) -> tuple[Any, Any]:
    model, x = carry
    return model, model(x)


def count(counter: Any) -> Any:
    counter.count[...] += 1
    return counter


once = nnx.jit(lambda model, x: model(x))


def python(steps: int, model: Any, x: Any) -> tuple[Any, Any]:
    """The plain Python loop."""
    for _ in range(steps):
        x = once(model, x)
    return model, x


def while_loop(n: Any, step: Any, init: Any, **options: Any) -> Any:
    body = lambda c: (c[0] + 1, step(c[1]))
    return lx.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), init), max_steps=STEPS, **options)[1]


def fori_loop(n: Any, step: Any, init: Any, **options: Any) -> Any:
    return lx.fori_loop(0, n, lambda _, c: step(c), init, max_steps=STEPS, **options)


def scan(n: Any, step: Any, init: Any, **options: Any) -> Any:
    return lx.scan(lambda c, _: (step(c), None), init, np.arange(STEPS), n, **options)[0]


EACH_LOOP = pytest.mark.parametrize("loop", [while_loop, fori_loop, scan])


def values(*objects: Any) -> list[np.ndarray]:
    """All that objects hold, typed keys as integers."""
    leaves = jax.tree.leaves([nnx.split(x, graph=True)[1] if not isinstance(x, jax.Array) else x for x in objects])
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def same(actual: Any, expected: Any) -> None:
    actual, expected = values(*actual), values(*expected)
    assert [(a.shape, a.dtype) for a in actual] == [(e.shape, e.dtype) for e in expected]
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-12)


def unchanged(model: Any, make: Callable[[], Any]) -> None:
    same([model], [make()])


# A module that is made in `jit` takes one program in place of twenty.


@ft.cache
def _maker(of: type, *arguments: Any) -> Any:
    return nnx.jit(lambda: of(*arguments))


def cell(seed: int = 0) -> Any:
    return _maker(Cell, seed)()


# ---- batches


COUNTS = np.array([3, 0, 4, 1], np.int32)
KEYS = jax.random.split(jax.random.key(1), 4)
XS = np.stack([X, 2.0 * X, -X, X + 1.0])


@nnx.jit
def stack() -> Any:
    """A cell for each key."""
    return nnx.vmap(Cell)(KEYS)


@ft.cache
def alone() -> Any:
    """The result, the mean and the counter of a cell of its own for each lane, as Python loops have them."""
    lanes = [python(int(n), cell(), x) for n, x in zip(COUNTS, XS, strict=True)]
    return [np.stack(values) for values in zip(*[(y, m.mean[...], m.count[...]) for m, y in lanes], strict=True)]
