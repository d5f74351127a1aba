"""Loops of libraries that a benchmark does without where they are not installed."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from benchmarks.workloads import Workload, program, with_while_loop
from loopax._src.extras import is_installed

BRAINSTATE, JAXMORE = "brainstate", "jaxmore"


def missing(*libraries: str) -> tuple[str, ...]:
    """Those that are not installed."""
    return tuple(library for library in libraries if not is_installed(library))


def brainstate_loops() -> Any:
    """The module with its loops; what it warns of at import is not about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("brainstate.transform")


def brainstate_while(goes_on: Callable[..., Any], body: Callable[..., Any], start: Any, max_steps: int) -> Any:
    """Scans of 16 within scans of 16, each under `jax.checkpoint`, as Equinox's `bounded`."""
    return brainstate_loops().bounded_while_loop(goes_on, body, start, max_steps=max_steps)


def jaxmore_while(goes_on: Callable[..., Any], body: Callable[..., Any], start: Any, max_steps: int) -> Any:
    """A `lax.scan` of the bound's length, of a `lax.cond` that takes a step or none."""
    loop = importlib.import_module("jaxmore").bounded_while_loop
    return loop(goes_on, body, start, max_steps=max_steps + 1)  # it raises where the bound itself is reached


WHILE_LOOPS: dict[str, Callable[..., Any]] = {BRAINSTATE: brainstate_while, JAXMORE: jaxmore_while}


def with_brainstate_scan(workload: Workload) -> Callable[..., Array]:
    """Its scan with checkpoints, whose number of steps is a constant."""

    def run(parameters: Any, start: Array, rows: Any, _: Array) -> Array:
        step = lambda y, row: (workload.step(parameters, y, None if rows is None else row), None)
        steps = jnp.arange(workload.bound) if rows is None else rows
        return brainstate_loops().checkpointed_scan(step, start, steps)[0]

    return program(workload, run)


def programs(workload: Workload) -> dict[str, Callable[..., Array]]:
    """Those of the libraries that are installed."""
    found = {f"{library} bounded_while_loop": library for library in WHILE_LOOPS if is_installed(library)}
    by_name = {
        name: with_while_loop(workload, WHILE_LOOPS[library], max_steps=workload.bound)
        for name, library in found.items()
    }
    if is_installed(BRAINSTATE):
        by_name[f"{BRAINSTATE} checkpointed_scan, static n"] = with_brainstate_scan(workload)
    return by_name
