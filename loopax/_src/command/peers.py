"""A recurrence of run-time length in each library, as its users would write it.

A recurrence is a step `(parameters, state, row) -> state`, repeated `n` times, with at most `bound` steps. Libraries
that have no gradient of such a loop run all steps of the bound, and keep the state as it is from step `n` on.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax

import loopax as lx
from loopax._src.extras import is_installed

Run = Callable[[Any, Any, Any, Any], Any]  # (parameters, start, rows, n) -> last state


class Recurrence(NamedTuple):
    """What is repeated."""

    step: Callable[[Any, Any, Any], Any]
    bound: int


def with_loopax(recurrence: Recurrence, static: bool = False, **options: Any) -> Run:
    """A traced length, or all steps of the bound; the options are those of `scan`."""

    def run(parameters: Any, start: Any, rows: Any, n: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            return recurrence.step(parameters, state, row), None

        if rows is not None or static:
            return lx.scan(step, start, rows, recurrence.bound if static else n, **options)[0]
        return lx.fori_loop(0, n, lambda _, state: step(state, None)[0], start, max_steps=recurrence.bound, **options)

    return run


def with_while_loop(recurrence: Recurrence, loop: Callable[..., Any], **options: Any) -> Run:
    """A while loop that counts its steps, of whatever library: `loop(condition, body, start)`."""

    def run(parameters: Any, start: Any, rows: Any, n: Any) -> Any:
        def body(carry: Any) -> Any:
            state, i = carry
            row = None if rows is None else rows[i]
            return recurrence.step(parameters, state, row), i + 1

        return loop(lambda carry: carry[1] < n, body, (start, jnp.int32(0)), **options)[0]

    return run


def with_equinox(recurrence: Recurrence) -> Run:
    """`equinox.internal.while_loop`, checkpointed."""
    return with_while_loop(recurrence, eqxi.while_loop, max_steps=recurrence.bound, kind="checkpointed")


def with_lax(recurrence: Recurrence) -> Run:
    """`lax.scan` over all steps of the bound."""

    def run(parameters: Any, start: Any, rows: Any, n: Any) -> Any:
        def step(state: Any, inputs: Any) -> Any:
            i, row = inputs
            return jnp.where(i < n, recurrence.step(parameters, state, row), state), None

        return lax.scan(step, start, (jnp.arange(recurrence.bound), rows))[0]

    return run


def with_nnx(recurrence: Recurrence) -> Run:
    """`nnx.scan` over all steps of the bound, with the parameters in a module."""
    from flax import nnx

    model = _nnx_model()

    @nnx.scan(in_axes=(None, None, nnx.Carry, 0, 0), out_axes=nnx.Carry)
    def masked(module: Any, n: Any, state: Any, i: Any, row: Any) -> Any:
        return jnp.where(i < n, recurrence.step(module.parameters(), state, row), state)

    def run(parameters: Any, start: Any, rows: Any, n: Any) -> Any:
        steps = jnp.arange(recurrence.bound)
        return masked(model(parameters), n, start, steps, steps if rows is None else rows)

    return run


@cache
def _nnx_model() -> Any:
    """A module that has parameters, and nothing else."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, parameters: list[Any]) -> None:
            self.number = len(parameters)
            for i, array in enumerate(parameters):
                setattr(self, f"parameter{i}", nnx.Param(array))

        def parameters(self) -> list[Any]:
            return [getattr(self, f"parameter{i}")[...] for i in range(self.number)]

    return Model


def peers(recurrence: Recurrence) -> dict[str, Run]:
    """The recurrence in all other libraries that are installed."""
    runs = {"Equinox": with_equinox(recurrence), "jax.lax, to the bound": with_lax(recurrence)}
    if is_installed("flax"):
        runs["Flax NNX, to the bound"] = with_nnx(recurrence)
    return runs


def gradient(run: Run) -> Callable[..., Any]:
    """Of the sum of squares of the last state, by the parameters."""
    return jax.grad(lambda parameters, start, rows, n: (run(parameters, start, rows, n) ** 2).sum())
