"""Loops of which a step breaks (`finite=`), in each way that they are written."""

from typing import Any

import jax.numpy as jnp

import loopax as lx
from tests.support.limited_loops import RUN_TIME

RAISED = (*RUN_TIME, ValueError)  # the last where JAX says it of a result that it hands out

X = jnp.array([0.5, 1.0, 2.0])
QUIET: dict[str, Any] = {"finite": True, "throw": False}
LANES = ["lockstep", "compact", "sequential", "auto"]


def broken_at(bad: Any, value: float = jnp.nan) -> Any:
    """A step that adds half of what there is, and puts a value into element 1 in row `bad`."""

    def step(x: Any, i: Any) -> Any:
        return jnp.where((i == bad) & (jnp.arange(3) == 1), value, 1.5 * x)

    return step


def fori(bad: Any, x: Any, n: Any = 6, value: float = jnp.nan, **options: Any) -> Any:
    step = broken_at(bad, value)
    options = {"finite": True, "throw": False, "info": True, **options}
    return lx.fori_loop(0, n, lambda i, x: step(x, i), x, **options)


def while_(bad: Any, x: Any, n: Any = 6, value: float = jnp.nan, **options: Any) -> Any:
    step = broken_at(bad, value)
    body = lambda c: (c[0] + 1, step(c[1], c[0]))
    options = {"finite": True, "throw": False, "info": True, **options}
    (_, last), info = lx.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x), **options)
    return last, info


def scan(bad: Any, x: Any, n: Any = 6, value: float = jnp.nan, **options: Any) -> Any:
    step = broken_at(bad, value)
    options = {"finite": True, "throw": False, "info": True, "length": n, **options}
    (last, _), info = lx.scan(lambda x, i: (step(x, i), jnp.sum(x)), x, jnp.arange(6, dtype=jnp.int32), **options)
    return last, info


LOOPS = [fori, while_, scan]
