"""Loops that take several steps in each iteration of the compiled loop: what `unroll` saves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import loopax as lx
from benchmarks.short.bodies import Body
from benchmarks.short.measure import Contender, Program, Sizes

UNROLLS = (1, 4, 16)


def forward(body: Callable[[], Body], sizes: Sizes) -> Program:
    """Return the loop of a body with each number of unrolled steps, with traced and with static length."""
    n, (name, step, start) = sizes.loop_steps, body()
    programs = {f"loopax fori_loop, unroll={k}": _counted(step, k) for k in UNROLLS}
    programs |= {f"lax.scan, static n, unroll={k}": _scanned(step, n, k) for k in UNROLLS}
    return _program(f"{name}, forward, {n} steps", programs, start, n)


def gradient(body: Callable[[], Body], sizes: Sizes) -> Program:
    """Return the gradient of the loop by its start; loopax stores some carries and recomputes the others."""
    n, (name, step, start) = sizes.gradient_steps, body()
    options: Any = {"max_steps": n, "throw": False, "kind": lx.Checkpointed()}
    programs = {f"loopax fori_loop, Checkpointed(), unroll={k}": _counted(step, k, **options) for k in UNROLLS}
    programs |= {f"lax.scan, static n, unroll={k}": _scanned(step, n, k) for k in UNROLLS}
    gradients = {name: jax.grad(_summed(program)) for name, program in programs.items()}
    return _program(f"{name}, gradient, {n} steps", gradients, start, n)


def _counted(step: Callable[[Array], Array], unroll: int, **options: Any) -> Callable[..., Array]:
    return lambda y, n: lx.fori_loop(0, n, lambda _, y: step(y), y, unroll=unroll, **options)


def _scanned(step: Callable[[Array], Array], length: int, unroll: int) -> Callable[..., Array]:
    return lambda y, _: lax.scan(lambda y, _: (step(y), None), y, None, length=length, unroll=unroll)[0]


def _summed(program: Callable[..., Array]) -> Callable[..., Array]:
    return lambda y, n: program(y, n).sum()


def _program(name: str, functions: dict[str, Callable[..., Any]], start: Array, n: int) -> Program:
    contenders = [Contender(*pair) for pair in functions.items()]
    return Program(name, contenders, (start, jnp.int32(n)), steps=n)
