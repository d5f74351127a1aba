"""Arrays of 64 bits where `jax_enable_x64` is off: derivatives of what takes elements out of them, or puts them in."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from loopax._src.jax_internals import keep_bits
from tests.support.reference import assert_close

X, Y, PLACES = (
    jnp.linspace(0.3, 2.0, 12).reshape(4, 3),
    jnp.linspace(-1.0, 1.0, 6).reshape(2, 3),
    jnp.array([2, 0], jnp.int32),
)

# Linear in float64[4, 3] and float64[2, 3] together; int32[2].
FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "gather": lambda x, y, i: x[i],
    "gather along another axis": lambda x, y, i: x.at[:, i].get(mode="promise_in_bounds", unique_indices=True),
    "scatter": lambda x, y, i: x.at[i].set(y, unique_indices=True),
    "dynamic slice": lambda x, y, i: lax.dynamic_slice_in_dim(x, i[0], 2),
    "dynamic update": lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i[1], 0),
    "concatenate": lambda x, y, i: jnp.concatenate([x, y]),
    "two results": lambda x, y, i: (x[1:], {"y": y[i[1]]}),
}


def same(f: Callable[..., Any], *arguments: Any) -> None:
    """With the flag and without."""
    expected = f(*arguments)
    with jax.enable_x64(False):
        found = f(*arguments)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    assert_close(found, expected)


def as_one(name: str) -> Callable[[Any, Any, Any], Any]:
    """A number, in which the function is not linear; without Python numbers, of which JAX makes 32 bits."""

    def one(x: Any, y: Any, i: Any) -> Any:
        results = jax.tree.leaves(keep_bits(FUNCTIONS[name], jnp.sin(x), y * y, i))
        return reduce(lax.add, [lax.dot(r.ravel(), jnp.cos(r).ravel()) for r in results])

    return one


def slopes(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient in both arrays, as one number again."""
    return lambda x, y, i: reduce(lax.add, [lax.dot(d.ravel(), d.ravel()) for d in jax.grad(f, (0, 1))(x, y, i)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_batches(name: str) -> None:
    f = lambda x, y, i: keep_bits(FUNCTIONS[name], x, y, i)
    same(f, X, Y, PLACES)
    same(jax.jit(f), X, Y, PLACES)
    same(jax.vmap(f), jnp.stack([X, X * X]), jnp.stack([Y, Y * Y]), jnp.stack([PLACES, PLACES[::-1]]))
    same(jax.vmap(f, (None, 2, 0)), X, jnp.stack([Y, Y * Y], 2), jnp.stack([PLACES, PLACES[::-1]]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name: str) -> None:
    """Forward over reverse, reverse three times, and a batch of reverse twice."""
    one = as_one(name)

    def derivatives(x: Any, y: Any, i: Any) -> Any:
        second = jax.grad(slopes(one), (0, 1))
        ys, numbers = jnp.stack([y, y * y]), jnp.stack([i, i[::-1]])
        return (
            jax.jvp(lambda x, y: jax.grad(one, (0, 1))(x, y, i), (x, y), (x * x, y)),
            jax.grad(slopes(slopes(one)), (0, 1))(x, y, i),
            jax.vmap(second, (None, 0, 0))(x, ys, numbers),
        )

    same(jax.jit(derivatives), X, Y, PLACES)
