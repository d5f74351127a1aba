"""Which tiny loops XLA's CPU backend compiles to one function, beside what `core/jaxpr/cost.py` expects."""

import re
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import loopax as lx
from benchmarks.auto import Choices
from benchmarks.cost_programs import Program
from benchmarks.groups import Findings
from benchmarks.workloads import runge_kutta

STEPS, DT = 5000, 1e-3
Field = Callable[[Array], Array]
METHODS: dict[str, Callable[[Field, Array], Array]] = {
    "Euler": lambda f, y: y + DT * f(y),
    "midpoint": lambda f, y: y + DT * f(y + DT / 2 * f(y)),
    "RK4": lambda f, y: runge_kutta(f, y, DT),
}


def polynomial(random: Random, size: int, style: str) -> Callable[[Array, Array], Array]:
    """Random sums of linear terms, products and cubes; components by unpacking, by indices, or all at once."""
    draw = lambda: (random.choice(("linear", "product", "cube")), random.randrange(size), random.randrange(size))
    terms = [[(*draw(), random.uniform(-1, 1)) for _ in range(random.randint(1, 4))] for _ in range(size)]

    def field(p: Array, y: Array) -> Array:
        if style == "whole":
            return p * jnp.roll(y, 1) * y - y
        unpacked = list(y) if style == "unpacked" else None
        get = lambda i: y[i] if unpacked is None else unpacked[i]
        value = {
            "linear": lambda a, b, c: c * get(a),
            "product": lambda a, b, c: p * get(a) * get(b),
            "cube": lambda a, b, c: c * get(a) ** 3,
        }
        return jnp.stack([sum((value[name](a, b, c) for name, a, b, c in row), jnp.float32(0)) for row in terms])

    return field


def programs() -> Iterator[Program]:
    """Forty-five."""
    for seed, (size, style, method) in enumerate(product((1, 2, 3, 4, 6), ("unpacked", "indexed", "whole"), METHODS)):
        yield program(polynomial(Random(seed), size, style), method, f"{size} components, {style}, {method}", size)


def program(field: Callable[[Array, Array], Array], method: str, name: str, size: int) -> Program:
    """The sum of squares of the last state."""

    def of_kind(kind: lx.Kind) -> Callable[..., Array]:
        step = lambda p, y: METHODS[method](lambda y: field(p, y), y)
        return lambda p, y: (lx.fori_loop(0, STEPS, lambda _, y: step(p, y), y, kind=kind) ** 2).sum()

    return Program(name, of_kind, (jnp.float32(0.5), jnp.linspace(0.1, 0.5, size)), (0, 1))


def loops_of(program: Program, kind: lx.Kind) -> str:
    """`both` where the loops of the gradient are a function each, `forward` where the first is alone, else `none`."""
    text = jax.jit(program.gradient(kind)).lower(*program.arguments).compile().as_text() or ""
    entry = text[text.index("\nENTRY") :]
    found = re.findall(r"= .*? (while|call)\(", entry)  # what is one function is called
    return {("call", "call"): "both", ("call", "while"): "forward"}.get(tuple(found[:2]), "none")


def row(program: Program) -> dict[str, Any]:
    """What is expected, and what is."""
    step = Choices(program).loop.step
    compiled = {kind: loops_of(program, kind) for kind in (lx.Bounded(), lx.Residuals())}
    calls = {lx.Bounded(): step.carry_calls, lx.Residuals(): step.residual_calls}
    is_one = {kind: calls[kind] < 75 for kind in calls}  # no calls of operations, but perhaps a little for rows
    return {
        "program": program.name,
        "Bounded()": compiled[lx.Bounded()],
        "expected": "both" if is_one[lx.Bounded()] else "not both",
        "Residuals()": compiled[lx.Residuals()],
        "expected of it": "both" if is_one[lx.Residuals()] else "not both",
        "right": all((compiled[kind] == "both") == is_one[kind] for kind in calls),
    }


def tables() -> list[Findings]:
    """All programs."""
    remark = "Loops that XLA compiles to one function are several times as fast (docs/how-it-works.md)."
    return [Findings("Tiny loops that are one function", lambda: list(map(row, programs())), remark)]
