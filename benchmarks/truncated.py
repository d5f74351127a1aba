"""Derivatives of some steps: the last ones, or windows of them, against the whole gradient and against hands."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import loopax as lx
from benchmarks import workloads
from benchmarks.groups import Group, Target
from benchmarks.measure import Case

LAST, WINDOW = 10, 50
OF_LAST, OF_WINDOWS = f"loopax Truncated(last={LAST})", f"loopax Truncated(window={WINDOW})"
TWO_SCANS = "lax.scan, stop_gradient, lax.scan, by hand"
NESTED = "lax.scan of windows, stop_gradient between them, by hand"
NESTED_CHECKPOINT = "lax.scan of jax.checkpoint of windows, stop_gradient between them, by hand"
CHECKPOINTED = "loopax Checkpointed()"
WHOLE = {CHECKPOINTED: lx.Checkpointed(), "loopax Bounded()": lx.Bounded(), "loopax Residuals()": lx.Residuals()}
BY_SELECT = "lax.scan, stop_gradient and jnp.where in the body"

Run = Callable[[Callable[..., Any], Array, Array], tuple[Array, Array]]
"""(step, start, rows) -> the last state, and the loss of each step."""


# ---- what people write


def two_scans(step: Callable[..., Any], start: Array, rows: Array) -> Any:
    """The last steps behind the others, which are constants."""
    first = len(rows) - LAST
    held = lax.stop_gradient(lax.scan(step, start, rows[:first])[0])
    return lax.scan(step, held, rows[first:])


def nested(step: Callable[..., Any], start: Array, rows: Array) -> Any:
    """A loop over windows, each of which is a loop over its steps."""
    return _over_windows(lambda h, rows: lax.scan(step, lax.stop_gradient(h), rows), start, rows)


def nested_checkpoint(step: Callable[..., Any], start: Array, rows: Array) -> Any:
    """The same, which evaluates a window again in place of storing what happened in it."""
    window = jax.checkpoint(lambda h, rows: lax.scan(step, lax.stop_gradient(h), rows))
    return _over_windows(window, start, rows)


def _over_windows(window: Callable[..., Any], start: Array, rows: Array) -> Any:
    h, losses = lax.scan(window, start, rows.reshape(-1, WINDOW, *rows.shape[1:]))
    return h, losses.reshape(-1)


def by_select(is_held: Callable[[Array], Any]) -> Run:
    """One loop, which asks in each step whether the state behind it is a constant."""

    def run(step: Callable[..., Any], start: Array, rows: Array) -> Any:
        def body(h: Array, numbered: Any) -> Any:
            number, row = numbered
            h, loss = step(h, row)
            return jnp.where(is_held(number), lax.stop_gradient(h), h), loss

        return lax.scan(body, start, (jnp.arange(len(rows)), rows))

    return run


def of_loopax(kind: lx.Kind, derivative: lx.Derivative | None = None) -> Run:
    """A scan of this kind, with this derivative."""
    return lambda step, start, rows: lx.scan(step, start, rows, kind=kind, derivative=derivative)


# ---- what is compared


def gradient(workload: workloads.Workload, run: Run, of_rows: bool) -> Callable[..., Any]:
    """With respect to the weights: of the mean loss of all steps, or of the last state's."""

    def loss(weights: Any, start: Array, rows: Array) -> Array:
        def step(h: Array, row: Array) -> tuple[Array, Array]:
            h = workload.step(weights, h, row)
            return h, (h**2).mean()

        h, losses = run(step, start, rows)
        return losses.mean() if of_rows else (h**2).mean()

    return jax.grad(loss)


def _group(title: str, workload: workloads.Workload, runs: dict[str, Run], of_rows: bool, targets: Any) -> Group:
    arguments = workload.parameters, workload.start, workload.rows
    cases = [Case(name, gradient(workload, run, of_rows), arguments) for name, run in runs.items()]
    return Group(f"Truncated: {title}, {workload.name}", cases, targets)


def last_steps(workload: workloads.Workload) -> Group:
    """The derivative of the last steps."""
    runs = {
        OF_LAST: of_loopax(lx.Residuals(), lx.Truncated(last=LAST)),
        TWO_SCANS: two_scans,
        BY_SELECT: by_select(lambda number: number < workload.bound - LAST),
        **{name: of_loopax(kind) for name, kind in WHOLE.items()},
    }
    targets = [
        Target("time", OF_LAST, TWO_SCANS, 1.05),
        Target("temporary memory", OF_LAST, TWO_SCANS, 1.05, "temporary_mib"),
        Target("time", OF_LAST, BY_SELECT, 0.5),
    ]
    return _group(f"the last {LAST} steps", workload, runs, False, targets)


def windows(workload: workloads.Workload) -> Group:
    """The derivative of each window."""
    runs = {
        OF_WINDOWS: of_loopax(lx.Residuals(), lx.Truncated(window=WINDOW)),
        NESTED_CHECKPOINT: nested_checkpoint,
        NESTED: nested,
        BY_SELECT: by_select(lambda number: (number + 1) % WINDOW == 0),
        **{name: of_loopax(kind) for name, kind in WHOLE.items()},
    }
    targets = [
        Target("time", OF_WINDOWS, NESTED_CHECKPOINT, 1.1),
        Target("temporary memory", OF_WINDOWS, NESTED_CHECKPOINT, 1.1, "temporary_mib"),
        Target("time", OF_WINDOWS, NESTED, 1.1),
        Target("time", OF_WINDOWS, CHECKPOINTED, 1.0),
    ]
    return _group(f"windows of {WINDOW} steps", workload, runs, True, targets)


def groups() -> list[Group]:
    """All tables."""
    workload = workloads.recurrent()
    return [last_steps(workload), windows(workload)]
