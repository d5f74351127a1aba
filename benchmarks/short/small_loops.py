"""Loops of a body of two flops, in the forms that loopax, JAX and Equinox have: what a step costs besides its body."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import Array, lax

import loopax as lx
from benchmarks.short.measure import Contender, Program, Sizes

Loop = Callable[[Array, Array, Array], Array]  # (rate, start, number of steps) -> last state


def step(rate: Array, y: Array) -> Array:
    """Return the next state: a multiplication and an addition, whose derivative depends on the state."""
    return y - rate * y * y


# ---- the same loop in the forms that there are


def while_loop(loop: Callable[..., Any], **options: Any) -> Loop:
    """Return a while loop that counts its steps."""

    def program(rate: Array, y: Array, n: Array) -> Array:
        def body(state: Any) -> Any:
            return step(rate, state[0]), state[1] + 1, state[2]

        return loop(lambda state: state[1] < state[2], body, (y, jnp.int32(0), n), **options)[0]

    return program


def fori_loop(loop: Callable[..., Any], **options: Any) -> Loop:
    """Return a loop whose number of steps is known when it starts."""
    return lambda rate, y, n: loop(0, n, lambda _, y: step(rate, y), y, **options)


def scan(loop: Callable[..., Any], **options: Any) -> Loop:
    """Return a loop whose number of steps is known when it is compiled."""
    return lambda rate, y, _: loop(lambda y, _: (step(rate, y), None), y, None, **options)[0]


def scan_of_checkpoints(f: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `lax.scan` with `jax.checkpoint` around the body: it stores carries, and not what the body computes."""
    return lax.scan(jax.checkpoint(f), *arguments, **options)


# ---- what is measured


def one_loop(sizes: Sizes) -> Program:
    """Return one loop, forward."""
    n = sizes.loop_steps
    loops = {
        "loopax while_loop": while_loop(lx.while_loop),
        "loopax fori_loop": fori_loop(lx.fori_loop),
        "loopax scan, static n": scan(lx.scan, length=n),
        "lax.while_loop": while_loop(lax.while_loop),
        "lax.fori_loop": fori_loop(lax.fori_loop),
        "lax.scan, static n": scan(lax.scan, length=n),
        "Equinox while_loop": while_loop(eqxi.while_loop, kind="lax"),
    }
    return _program(f"forward, {n} steps", loops, n)


def batch(sizes: Sizes) -> Program:
    """Return a batch of loops, forward; each lane has a condition of its own, and all take as many steps."""
    n, lanes = sizes.loop_steps, sizes.batch
    loops = {
        "loopax while_loop": while_loop(lx.while_loop),
        "loopax while_loop, compact": while_loop(lx.while_loop, lanes="compact"),
        "loopax fori_loop": fori_loop(lx.fori_loop),
        "lax.while_loop": while_loop(lax.while_loop),
        "Equinox while_loop": while_loop(eqxi.while_loop, kind="lax"),
    }
    batched = {name: jax.vmap(loop, (None, 0, 0)) for name, loop in loops.items()}
    return _program(f"forward, {lanes} lanes, {n} steps", batched, n, lanes)


def gradient(sizes: Sizes) -> Program:
    """Return the gradient of one loop by the rate and the start."""
    n = sizes.gradient_steps
    kinds = lx.Auto(), lx.Checkpointed(), lx.Bounded(), lx.Residuals()
    bound: Any = {"max_steps": n, "throw": False}
    loops = {f"loopax fori_loop, {kind}": fori_loop(lx.fori_loop, kind=kind, **bound) for kind in kinds}
    loops |= {
        "Equinox while_loop, checkpointed": while_loop(eqxi.while_loop, kind="checkpointed", max_steps=n),
        "lax.scan, static n": scan(lax.scan, length=n),
        "lax.scan of jax.checkpoint, static n": scan(scan_of_checkpoints, length=n),
    }
    return _program(f"gradient, {n} steps", {name: jax.grad(loop, (0, 1)) for name, loop in loops.items()}, n)


def _program(name: str, functions: dict[str, Callable[..., Any]], n: int, lanes: int | None = None) -> Program:
    per_lane = partial(jnp.full, () if lanes is None else lanes)
    arguments = jnp.float32(1e-3), per_lane(jnp.float32(0.5)), per_lane(jnp.int32(n))
    return Program(name, [Contender(*pair) for pair in functions.items()], arguments, steps=n)
