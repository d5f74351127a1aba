"""What it costs to look at each step (`finite=`), beside the same loop without, steps of about 5 us and more."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import loopax as lx
from benchmarks.groups import Findings
from benchmarks.measure import Case, measure
from benchmarks.short.bodies import random
from benchmarks.workloads import lorenz

ROUNDS = 15
REMARK = "Bound: 1.1, forward and in a gradient with respect to the start."


def perceptron(*sizes: int) -> tuple[Callable[[Array], Array], Array]:
    """Two products with matrices, of a vector or of several at once: sizes of the batch, the input, and between."""
    *batch, n, between = sizes
    wide, narrow = random(n, between, scale=0.05), random(between, n, scale=0.05)
    return lambda y: y + 0.01 * jnp.tanh(y @ wide) @ narrow, random(*batch, n)


def thousand_lorenz() -> tuple[Callable[[Array], Array], Array]:
    """A thousand systems at once."""
    step = lorenz().step
    return jax.vmap(lambda y: step(None, y, None)), 1.0 + random(1000, 3, scale=0.1)


def sines(n: int) -> tuple[Callable[[Array], Array], Array]:
    """Elementwise arithmetic alone."""
    return lambda y: 1.1 * jnp.sin(y) + 0.1, random(n)


PROGRAMS = {
    "MLP 64-256-64": (perceptron(64, 256), 4000),
    "MLP 256-1024-256": (perceptron(256, 1024), 1000),
    "MLP 64-256-64, 64 at once": (perceptron(64, 64, 256), 500),
    "Lorenz by RK4, 1000 at once": (thousand_lorenz(), 1000),
    "sine of 4096 numbers": (sines(4096), 2000),
    "sine of 65536 numbers": (sines(65536), 300),
}


def looping(step: Callable[[Array], Array], finite: Any, steps: int) -> Callable[[Array], Array]:
    """So many steps."""
    return lambda y: lx.fori_loop(0, steps, lambda _, y: step(y), y, finite=finite)


def rows() -> list[dict[str, Any]]:
    """Each program forward, and its gradient."""
    found = []
    for name, ((step, start), steps) in PROGRAMS.items():
        row: dict[str, Any] = {"a step": name}
        for what in ("forward", "gradient"):
            cases = []
            for case, finite in (("without", None), ("with", True)):
                loop = looping(step, finite, steps)
                value = loop if what == "forward" else jax.grad(lambda y, loop=loop: (loop(y) ** 2).mean())
                cases.append(Case(case, value, (start,)))
            of = measure(cases, ROUNDS)
            row[f"{what}, us a step"] = round(1000 * of["without"].milliseconds / steps, 1)
            row[f"{what}, with / without"] = round(of["with"].milliseconds / of["without"].milliseconds, 2)
        found.append(row)
    return found


def tables() -> list[Findings]:
    """The only one."""
    return [Findings("Steps that are looked at: finite=True", rows, REMARK)]
