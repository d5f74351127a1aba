"""The programs that are measured: each as a step, its parameters, a start, rows of inputs and a bound."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.short import programs as peers
from benchmarks.short.programs import gated_unit, some_weights

Step = Callable[[Any, Array, Any], Array]  # (parameters, state, row) -> state


@dataclass(frozen=True)
class Workload:
    """A recurrence."""

    name: str
    step: Step
    parameters: Any
    start: Array
    rows: Array | None
    bound: int
    differentiated: tuple[int, ...]  # which of (parameters, start) the gradient is taken of

    @property
    def recurrence(self) -> peers.Recurrence:
        """What is repeated."""
        return peers.Recurrence(self.step, self.bound)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of every program below: the number of steps is a value, not a constant."""
        return self.parameters, self.start, jnp.int32(self.bound)


def runge_kutta(derivative: Callable[[Array], Array], y: Array, dt: float) -> Array:
    """One classical Runge-Kutta step."""
    k1 = derivative(y)
    k2 = derivative(y + dt / 2 * k1)
    k3 = derivative(y + dt / 2 * k2)
    k4 = derivative(y + dt * k3)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def _lorenz_unpacked(state: Array) -> Array:
    x, y, z = state
    return jnp.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])


def _lorenz_indexed(s: Array) -> Array:
    return jnp.stack([10 * (s[1] - s[0]), s[0] * (28 - s[2]) - s[1], s[0] * s[1] - 8 / 3 * s[2]])


def lorenz() -> Workload:
    """The Lorenz system; XLA compiles its step, and that of its gradient, to one function each."""
    step = lambda _, y, __: runge_kutta(_lorenz_unpacked, y, 1e-3)
    return Workload("Lorenz, RK4, n = 20000", step, (), jnp.ones(3), None, 20_000, (1,))


def lorenz_indexed() -> Workload:
    """The same, written with indices: XLA does not compile the gradient's step to one function."""
    step = lambda _, y, __: runge_kutta(_lorenz_indexed, y, 1e-3)
    return Workload("Lorenz by indices, RK4, n = 20000", step, (), jnp.ones(3), None, 20_000, (1,))


def _perceptron(weights: Any, y: Array) -> Array:
    a, b, c = weights
    return jnp.tanh(jnp.tanh(y @ a) @ b) @ c


def perceptron() -> Workload:
    """A neural ODE."""
    step = lambda weights, y, _: runge_kutta(lambda y: _perceptron(weights, y), y, 1e-2)
    weights = some_weights((16, 64), (64, 64), (64, 16), scale=0.1)
    start = jnp.asarray(np.random.RandomState(1).randn(16, 16), jnp.float32)
    return Workload("MLP 16-64-64-16, RK4, batch 16, n = 2000", step, weights, start, None, 2000, (0, 1))


def recurrent() -> Workload:
    """A recurrent network over rows of inputs."""
    rows = jnp.asarray(np.random.RandomState(1).randn(1000, 32, 128), jnp.float32)
    weights = some_weights((128, 384), (128, 384), scale=0.05)
    return Workload("GRU 128, batch 32, n = 1000", gated_unit, weights, jnp.zeros((32, 128)), rows, 1000, (0, 1))


def program(workload: Workload, run: peers.Run) -> Callable[..., Array]:
    """The sum of squares of the last state."""
    return lambda parameters, start, n: (run(parameters, start, workload.rows, n) ** 2).sum()


def with_loopax(workload: Workload, kind: Any, static: bool = False) -> Callable[..., Array]:
    """With `static`, the number of steps is a constant."""
    return program(workload, peers.with_loopax(workload.recurrence, static, kind=kind, throw=False))


def with_while_loop(workload: Workload, loop: Callable[..., Any], **options: Any) -> Callable[..., Array]:
    """A while loop that counts its steps, of any library."""
    return program(workload, peers.with_while_loop(workload.recurrence, loop, **options))


def with_equinox(workload: Workload) -> Callable[..., Array]:
    """Equinox's internal loops with the same bound (its scan has no run-time length)."""
    if workload.rows is None:
        return program(workload, peers.with_equinox(workload.recurrence))

    def run(parameters: Any, start: Array, rows: Array, _: Array) -> Array:
        step = lambda y, x: (workload.step(parameters, y, x), None)
        return eqxi.scan(step, start, rows, length=workload.bound, kind="checkpointed")[0]

    return program(workload, run)


def with_lax_scan(workload: Workload, checkpoint: bool) -> Callable[..., Array]:
    """`lax.scan` with a constant number of steps; with `checkpoint` it saves every carry, not residuals."""

    def run(parameters: Any, start: Array, rows: Any, _: Array) -> Array:
        plain = lambda y, x: (workload.step(parameters, y, x), None)
        step: Any = jax.checkpoint(plain) if checkpoint else plain
        return lax.scan(step, start, rows, length=workload.bound)[0]

    return program(workload, run)


def gradient(workload: Workload, program: Callable[..., Array]) -> Callable[..., Any]:
    """The gradient with respect to what the workload says."""
    return jax.grad(program, workload.differentiated)
