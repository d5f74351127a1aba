"""Loops of libraries that a benchmark does without where they are not installed."""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from benchmarks.workloads import Workload

BRAINSTATE, JAXMORE = "brainstate", "jaxmore"


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


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


def with_while_loop(workload: Workload, library: str) -> Callable[..., Array]:
    """The sum of squares of the last state, by the bounded while loop of a library."""

    def program(parameters: Any, start: Array, n: Array) -> Array:
        def body(state: Any) -> Any:
            y, i, end = state
            row = None if workload.rows is None else workload.rows[i]
            return workload.step(parameters, y, row), i + 1, end

        start_of_all = start, jnp.int32(0), n
        last, *_ = WHILE_LOOPS[library](lambda state: state[1] < state[2], body, start_of_all, workload.bound)
        return (last**2).sum()

    return program


def with_brainstate_scan(workload: Workload) -> Callable[..., Array]:
    """Its scan with checkpoints, whose number of steps is a constant."""

    def program(parameters: Any, start: Array, _: Array) -> Array:
        step = lambda y, row: (workload.step(parameters, y, None if workload.rows is None else row), None)
        rows = jnp.arange(workload.bound) if workload.rows is None else workload.rows
        return (brainstate_loops().checkpointed_scan(step, start, rows)[0] ** 2).sum()

    return program


def programs(workload: Workload) -> dict[str, Callable[..., Array]]:
    """Those of the libraries that are installed."""
    found = {f"{library} bounded_while_loop": library for library in WHILE_LOOPS if is_installed(library)}
    by_name = {name: with_while_loop(workload, library) for name, library in found.items()}
    if is_installed(BRAINSTATE):
        by_name[f"{BRAINSTATE} checkpointed_scan, static n"] = with_brainstate_scan(workload)
    return by_name
