"""Batches of loops that stop at different steps."""

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import loopax as lx
from benchmarks.groups import Group
from benchmarks.measure import Case
from loopax._src.core.batching import lockstep

BOUND = 1000


def log_normal_counts(size: int = 1024) -> Array:
    """Log-normal trip counts: sigma 1.2, mean about 65."""
    counts = np.random.RandomState(0).lognormal(np.log(65) - 1.2**2 / 2, 1.2, size)
    return jnp.asarray(np.clip(counts, 1, BOUND), jnp.int32)


def weights(*lanes: int) -> list[Array]:
    random = np.random.RandomState(0)
    shapes = [(16, 64), (64, 64), (64, 16)]
    return [jnp.asarray(0.1 * random.randn(*lanes, *shape), jnp.float32) for shape in shapes]


def step(weights: Any, y: Array) -> Array:
    """One step of a small network."""
    a, b, c = weights
    return y + 0.01 * (jnp.tanh(jnp.tanh(y @ a) @ b) @ c)


def lane_with_loopax(weights: Any, y: Array, n: Array) -> Array:
    """One lane."""
    last = lx.fori_loop(0, n, lambda i, y: step(weights, y), y, max_steps=BOUND, throw=False, kind=lx.Checkpointed())
    return (last**2).sum()


def lane_with_equinox(weights: Any, y: Array, n: Array) -> Array:
    """One lane."""
    body = lambda c: (step(weights, c[0]), c[1] + 1)
    last, _ = eqxi.while_loop(lambda c: c[1] < n, body, (y, jnp.int32(0)), max_steps=BOUND, kind="checkpointed")
    return (last**2).sum()


def ensemble(size: int = 64) -> tuple[Any, ...]:
    """Lanes with weights of their own, in which filling inactive lanes is most expensive."""
    starts = jnp.asarray(np.random.RandomState(1).randn(size, 16), jnp.float32)
    return weights(size), starts, log_normal_counts(size)


def without_filling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let finished lanes of a program compute on their own state, to measure what filling them costs."""

    def traced(*arguments: Any) -> Any:
        module: Any = lockstep
        fill_inactive = module.fill_inactive
        module.fill_inactive = lambda _, operands, *__: list(operands)
        try:
            return function(*arguments)
        finally:
            module.fill_inactive = fill_inactive

    return traced


def filling() -> Group:
    """What filling inactive lanes costs where every lane has weights of its own: no peer, and no target."""
    forward = jax.vmap(lane_with_loopax)
    gradient = jax.vmap(jax.grad(lane_with_loopax))
    outside = jax.grad(lambda weights, y, n: forward(weights, y, n).sum())
    programs = {"forward": forward, "vmap of grad": gradient, "grad of vmap": outside}
    programs |= {f"{name}, not filled": without_filling(f) for name, f in programs.items()}
    cases = [Case(name, program, ensemble()) for name, program in programs.items()]
    return Group("64 lanes with weights of their own: what filling inactive lanes costs", cases, [])


def groups() -> list[Group]:
    """One table."""
    return [filling()]
