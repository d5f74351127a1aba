"""Loops that ask their condition only every k steps: what that saves.

The body is repeated k times before the condition is asked again. Steps after the end are computed, and discarded by
masks; the first of the k steps needs no mask.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import loopax as lx
from benchmarks.short.bodies import Body, perceptron, two_flops
from benchmarks.short.measure import Contender, Program, Sizes

EVERY = (1, 4, 16)
Loop = Callable[[Array, Array], Array]  # (start, number of steps) -> last state


def checked_every(k: int, goes_on: Callable[[Any], Array], body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the body of a loop that is asked its condition every k steps."""

    def masked(state: Any) -> Any:
        go = goes_on(state)
        return jax.tree.map(lambda new, old: jnp.where(go, new, old), body(state), state)

    def steps(state: Any) -> Any:
        state = body(state)
        for _ in range(k - 1):
            state = masked(state)
        return state

    return steps


def until_counted(body: Body, k: int, loop: Callable[..., Any], **options: Any) -> Loop:
    """Return a while loop that counts its steps, and asks every k steps whether they are enough."""

    def run(y: Array, n: Array) -> Array:
        def goes_on(state: Any) -> Array:
            return state[1] < n

        steps = checked_every(k, goes_on, lambda state: (body.step(state[0]), state[1] + 1))
        return loop(goes_on, steps, (y, jnp.int32(0)), **options)[0]

    return run


# ---- what is measured


def one_loop(sizes: Sizes) -> Program:
    """Return the loop of two flops, forward."""
    return _program(two_flops(), "forward", _forward(two_flops()), sizes.loop_steps)


def matrix_body(sizes: Sizes) -> Program:
    """Return the loop of a small network, forward."""
    return _program(perceptron(), "forward", _forward(perceptron()), sizes.loop_steps)


def batch(sizes: Sizes) -> Program:
    """Return a batch of loops of two flops; each lane has a condition of its own, and all take as many steps."""
    lanes = {name: jax.vmap(loop) for name, loop in _forward(two_flops()).items()}
    return _program(two_flops(), f"forward, {sizes.batch} lanes", lanes, sizes.loop_steps, sizes.batch)


def gradient(sizes: Sizes) -> Program:
    """Return the gradient of the loop of two flops by its start; loopax stores some carries."""
    body, n = two_flops(), sizes.gradient_steps
    options: Any = {"kind": lx.Checkpointed(), "throw": False}
    loops = {
        f"loopax while_loop, Checkpointed(), k = {k}": until_counted(
            body, k, lx.while_loop, max_steps=-(-n // k), **options
        )
        for k in EVERY
    }
    return _program(body, "gradient", {name: jax.grad(loop) for name, loop in loops.items()}, n)


def _forward(body: Body) -> dict[str, Loop]:
    loops = {f"loopax while_loop, k = {k}": until_counted(body, k, lx.while_loop) for k in EVERY}
    return loops | {f"lax.while_loop, k = {k}": until_counted(body, k, lax.while_loop) for k in EVERY}


def _program(body: Body, what: str, functions: dict[str, Loop], n: int, lanes: int | None = None) -> Program:
    start, count = body.start, jnp.int32(n)
    if lanes is not None:
        start, count = jnp.full(lanes, start), jnp.full(lanes, count)
    contenders = [Contender(*pair) for pair in functions.items()]
    return Program(f"{body.name}, {what}, {n} steps", contenders, (start, count), steps=n)
