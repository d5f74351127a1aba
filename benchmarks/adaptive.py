"""The adaptive solver of `examples/adaptive_ode.py` against Diffrax's: the same method, control and tolerances."""

import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import loopax as lx
from benchmarks.groups import Group, Target
from benchmarks.measure import Case

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "adaptive_ode.py"))
OURS, DIFFRAX = "loopax Checkpointed(64)", "Diffrax"


def in_lanes(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(function, in_axes=(0, None, None))


def arguments(lanes: int) -> tuple[Any, ...]:
    """The stiffness of each lane, the start, and the requested times."""
    start, times = EXAMPLE["START"], EXAMPLE["TIMES"]
    return jnp.geomspace(1.0, 20.0, lanes), jnp.asarray(start, jnp.float32), jnp.asarray(times, jnp.float32)


def forward(lanes: int) -> Group:
    """The solution at the requested times."""
    programs = {"loopax": EXAMPLE["with_loopax"], DIFFRAX: EXAMPLE["with_diffrax"]}
    cases = [Case(name, in_lanes(f), arguments(lanes)) for name, f in programs.items()]
    return Group(f"Adaptive solver: forward, lanes = {lanes}", cases, [Target("time", "loopax", DIFFRAX, 1.0)])


def gradient(lanes: int) -> Group:
    """The gradient with respect to the stiffness of each lane."""
    kinds = {OURS: lx.Checkpointed(64), "loopax Checkpointed()": lx.Checkpointed(), "loopax Bounded()": lx.Bounded()}
    programs = {name: partial(EXAMPLE["with_loopax"], kind=kind) for name, kind in kinds.items()}
    programs |= {"loopax Auto()": partial(EXAMPLE["with_loopax"], kind=lx.Auto()), DIFFRAX: EXAMPLE["with_diffrax"]}
    gradients = {name: in_lanes(jax.grad(partial(EXAMPLE["energy"], f))) for name, f in programs.items()}
    targets = [Target("time", OURS, DIFFRAX, 1.0), Target("temporary memory", OURS, DIFFRAX, 1.0, "temporary_mib")]
    cases = [Case(name, f, arguments(lanes)) for name, f in gradients.items()]
    return Group(f"Adaptive solver: gradient, lanes = {lanes}", cases, targets)


def groups() -> list[Group]:
    """All tables."""
    return [table(lanes) for lanes in (1, 64) for table in (forward, gradient)]
