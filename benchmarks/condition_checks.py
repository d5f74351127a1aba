"""Loops that ask their condition only every k steps: where that pays.

The body is repeated k times before the condition is asked again. Steps after the end are computed, and thrown away by
masks; the first of the k needs none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import loopax as lx
from benchmarks.groups import Findings
from benchmarks.measure import Case, measure
from benchmarks.short.bodies import Body, perceptron, sines, two_flops
from benchmarks.short.every_k import checked_every
from benchmarks.workloads import lorenz

EVERY, LANES, ROUNDS = (1, 2, 4, 8, 16), 64, 7
MOST_IN_GRADIENTS = 4  # steps at a time: more take long to compile
REMARK = "The time relative to k = 1, measured in turn with it. In a batch, lanes take numbers of steps of their own."


@dataclass(frozen=True)
class Problem:
    """A loop whose end a condition decides."""

    name: str
    goes_on: Callable[[Any], Array]
    body: Callable[[Any], Any]
    start: Callable[[Array], Any]  # of a lane, from a number in (0, 1]; of 1, the most steps
    steps: int  # at most


# ---- the loop


def forward(problem: Problem, k: int) -> Callable[..., Any]:
    """With `lax.while_loop`."""
    steps = checked_every(k, problem.goes_on, problem.body)
    return lambda part: lax.while_loop(problem.goes_on, steps, problem.start(part))


def gradient(problem: Problem, k: int) -> Callable[..., Any]:
    """With respect to the start, with loopax."""
    steps = checked_every(k, problem.goes_on, problem.body)
    options: Any = {"max_steps": -(-problem.steps // k), "kind": lx.Checkpointed(), "throw": False}

    def value(y: Any, rest: Any) -> Array:
        last, *_ = lx.while_loop(problem.goes_on, steps, (y, *rest), **options)
        return (last**2).sum()

    def program(part: Array) -> Any:
        y, *rest = problem.start(part)
        return jax.grad(value)(y, rest)

    return program


# ---- what is run


def counted(body: Body, n: int) -> Problem:
    """A step that is repeated so many times."""
    return Problem(
        body.name,
        lambda state: state[1] < state[2],
        lambda state: (body.step(state[0]), state[1] + 1, state[2]),
        lambda part: (body.start, jnp.int32(0), jnp.ceil(part * n).astype(jnp.int32)),
        n,
    )


def escape(steps: int) -> Problem:
    """The Mandelbrot set: until a point leaves a circle, or for so many steps."""

    def body(state: Any) -> Any:
        (x, y), (a, b), i = state
        return jnp.stack([x * x - y * y + a, 2 * x * y + b]), jnp.stack([a, b]), i + 1

    # the boundary of the set is at 1/4: within it a point stays
    start = lambda part: (jnp.zeros(2), jnp.stack([0.25 + 1e-2 * (1 - part), 0.0 * part]), jnp.int32(0))
    goes_on = lambda state: ((state[0] ** 2).sum() < 4.0) & (state[2] < steps)
    return Problem("Mandelbrot set", goes_on, body, start, steps)


def fixed_point(steps: int) -> Problem:
    """Kepler's equation of an eccentric orbit by repeated substitution, to a tolerance."""

    def body(state: Any) -> Any:
        angle, _, mean, i = state
        return mean + 0.999 * jnp.sin(angle), angle, mean, i + 1

    start = lambda part: (part, part + 1.0, 1e-3 * part, jnp.int32(0))
    goes_on = lambda state: (jnp.abs(state[0] - state[1]) > 1e-7) & (state[3] < steps)
    return Problem("Kepler's equation", goes_on, body, start, steps)


def problems() -> list[Problem]:
    """From two operations a step to ten thousands."""
    rk4 = Body("Lorenz, RK4", lambda y: lorenz().step((), y, None), jnp.ones(3))
    return [
        counted(two_flops(), 10_000),
        escape(10_000),
        fixed_point(2_000),
        counted(rk4, 1_000),
        counted(sines(), 2_000),
        counted(perceptron(), 2_000),
    ]


def rows() -> list[dict[str, Any]]:
    """Each problem alone and in a batch, forward and its gradient."""
    return [
        _row(problem, what, program, lanes)
        for problem in problems()
        for what, program in (("forward", forward), ("gradient", gradient))
        for lanes in (1, LANES)
    ]


def _row(problem: Problem, what: str, program: Callable[..., Any], lanes: int) -> dict[str, Any]:
    part = jnp.float32(1.0) if lanes == 1 else jnp.linspace(0.05, 1.0, lanes)
    programs = {f"k = {k}": program(problem, k) for k in EVERY if what == "forward" or k <= MOST_IN_GRADIENTS}
    cases = [Case(name, jax.vmap(f) if lanes > 1 else f, (part,)) for name, f in programs.items()]
    times = {name: m.milliseconds for name, m in measure(cases, ROUNDS).items()}
    ratios = {f"k = {k}": times.get(f"k = {k}", math.nan) / times["k = 1"] for k in EVERY[1:]}
    about = {"body": problem.name, "": what, "lanes": str(lanes), "ms, k = 1": times["k = 1"]}
    return about | {name: None if math.isnan(ratio) else ratio for name, ratio in ratios.items()}


def tables() -> list[Findings]:
    """One table."""
    return [Findings("Condition asked every k steps", rows, REMARK)]
