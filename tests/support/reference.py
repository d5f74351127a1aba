"""The plain Python loops that define what loopax's loops mean, and tools to compare with them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def while_reference(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], val: Any) -> tuple[Any, int]:
    """The final carry, and the number of steps."""
    steps = 0
    while bool(cond_fun(val)):
        val = body_fun(val)
        steps += 1
    return val, steps


def fori_reference(lower: int, upper: int, body_fun: Callable[[Any, Any], Any], val: Any) -> Any:
    """The final carry."""
    for i in range(lower, upper):
        val = body_fun(jnp.asarray(i), val)
    return val


def scan_reference(
    f: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    length: int | None = None,
    reverse: bool = False,
    stop: Callable[[Any, Any], Any] | None = None,
) -> tuple[Any, Any, int]:
    """The final carry, the rows of ys (zero where none was executed), and the number of steps."""
    rows = len(jax.tree.leaves(xs)[0])
    length = rows if length is None else length
    like = jax.eval_shape(lambda: f(carry, jax.tree.map(lambda x: x[0], xs))[1])
    ys = [jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), like) for _ in range(rows)]
    steps = 0
    for i in reversed(range(length)) if reverse else range(length):
        carry, ys[i] = f(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        steps += 1
        if stop is not None and bool(stop(carry, ys[i])):
            break
    return carry, jax.tree.map(lambda *rows: jnp.stack(rows), *ys), steps


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Compare pytrees of arrays in float64, up to rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.result_type(a) == jnp.result_type(e)
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=tolerance, atol=tolerance)
