"""Rollouts that look back on a window, and buffers: what a step costs as the series grows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import loopax as lx
from benchmarks.groups import EQUINOX, LAX_SCAN, Counts, Group, Target
from benchmarks.measure import Case
from examples import multistep_integrator as example

SHORT, LONG = 256, 4096
WINDOW = 4


def model(size: int) -> tuple[Array, Array]:
    """Weights and the first rows of an autoregressive model of rows of this size."""
    random = np.random.RandomState(0)
    weights = 0.5 * random.randn(WINDOW, size, size) / size**0.5
    return jnp.asarray(weights, jnp.float32), jnp.asarray(random.randn(WINDOW, size), jnp.float32)


def following(weights: Array, window: Array) -> Array:
    """The row after a window."""
    return jnp.tanh(jnp.einsum("kij,kj->i", weights, window))


# ---- one series


def windowed(bound: int) -> Callable[..., Array]:
    """A rollout whose state is its history."""

    def program(weights: Array, start: Array, n: Array) -> Array:
        step = lambda _, history: (None, following(weights, history.rows))
        history = lx.History(WINDOW, start)
        return (lx.rollout(step, None, n, history=history, max_steps=bound, throw=False).outputs ** 2).sum()

    return program


def buffered(bound: int, kind: lx.Kind | None = None) -> Callable[..., Array]:
    """The same, with a buffer that is read in every step and written in a third of them."""

    def program(weights: Array, start: Array, n: Array) -> Array:
        def step(state: Any, history: lx.History) -> Any:
            i, buffer = state
            row = following(weights, history.rows) + 0.1 * buffer[-1]
            return (i + 1, buffer.append(row, when=i % 3 == 0)), row

        state = jnp.int32(0), lx.Buffer(bound // 3 + 2, like=start[0]).append(start[0])
        options: Any = {"max_steps": bound, "throw": False, "kind": kind or lx.Auto()}
        done = lx.rollout(step, state, n, history=lx.History(WINDOW, start), **options)
        (_, buffer), _ = done.state
        return (done.outputs**2).sum() + buffer.rows.sum()

    return program


def by_hand(bound: int, loop: Callable[[Callable[..., Any], Any, int], Any]) -> Callable[..., Array]:
    """All rows in one array, of which each step takes a slice and sets a row."""

    def program(weights: Array, start: Array, _: Array) -> Array:
        def body(i: Any, rows: Array) -> Array:
            window = lax.dynamic_slice_in_dim(rows, i, WINDOW)
            return rows.at[i + WINDOW].set(following(weights, window))

        rows = jnp.zeros((bound + WINDOW, start.shape[1])).at[:WINDOW].set(start)
        return (loop(body, rows, bound)[WINDOW:] ** 2).sum()

    return program


def with_lax(body: Callable[..., Any], start: Any, bound: int) -> Any:
    return lax.fori_loop(0, bound, body, start)


def with_equinox(body: Callable[..., Any], start: Any, bound: int) -> Any:
    step = lambda carry, i: (body(i, carry), None)
    return eqxi.scan(step, start, jnp.arange(bound), length=bound, kind="checkpointed")[0]


def repeated(
    function: Callable[..., Any], times: int, arguments: tuple[Any, Array, Array]
) -> tuple[Any, tuple[Any, ...]]:
    """A function of some starts, one after the other: short series take as many steps in all as a long one.

    Else, on a machine that does other things as well, the shorter program is interrupted less often.
    """
    weights, start, n = arguments
    program = lambda weights, starts, n: lax.map(lambda start: function(weights, start, n), starts)
    return program, (weights, jnp.stack([start] * times), n)


def gradients(name: str, program: Callable[[int], Callable[..., Array]], size: int = 3) -> list[Case]:
    """Short series and a long one, with the same number of steps in all."""
    cases = []
    for n in (SHORT, LONG):
        gradient = jax.grad(program(n), (0, 1))
        cases.append(
            Case(f"{name}, {LONG // n} x {n} rows", *repeated(gradient, LONG // n, (*model(size), jnp.int32(n))))
        )
    return cases


def one_series() -> Group:
    """Rows of 3 floats: 48 KiB in the longer one."""
    rollout, buffer = "lx.rollout with lx.History", "the same with lx.Buffer"
    cases = [*gradients(rollout, windowed), *gradients(buffer, buffered)]
    cases += gradients("lax.fori_loop on one array", lambda bound: by_hand(bound, with_lax))
    cases += gradients(f"{EQUINOX} on one array", lambda bound: by_hand(bound, with_equinox))
    targets = [
        Target("time", f"{name}, 1 x {LONG} rows", f"{name}, {LONG // SHORT} x {SHORT} rows", bound)
        for name, bound in [(rollout, 1.3), (buffer, 1.5)]
    ]
    return Group("Histories and buffers: gradient, rows of 3 floats", cases, targets, rounds=9)


# ---- lanes

LANES, SHORT_LANES, LONG_LANES = 32, 512, 8192


def of_lanes(size: int, bound: float | None) -> Group:
    """Forward and gradient; every lane takes a number of steps of its own, and counts its rows."""
    cases, targets = [], []
    for name in ("forward", "gradient"):
        cases += [lanes_case(name, size, n) for n in (SHORT_LANES, LONG_LANES)]
        short, long = cases[-2:]
        targets += [Target("time", long.name, short.name, bound)] if bound else []
    title = f"Histories and buffers: {LANES} lanes, rows of {size} floats, per-lane counts"
    return Group(title, cases, targets, rounds=5)


def lanes_case(name: str, size: int, n: int) -> Case:
    """One way to store, so that not the choice of it is compared."""
    weights, start = model(size)
    counts = np.random.RandomState(0).randint(n // 2, n + 1, LANES)
    counts[0] = n  # the steps that the batch takes
    lanes = jax.vmap(buffered(n, lx.Checkpointed()), (None, 0, 0))
    program = lambda weights, starts, counts: lanes(weights, starts, counts).sum()
    starts = start * jnp.linspace(0.5, 1.5, LANES)[:, None, None]
    function = jax.grad(program, (0, 1)) if name == "gradient" else program
    times, arguments = LONG_LANES // n, (weights, starts, jnp.asarray(counts, jnp.int32))
    return Case(f"{name}, {times} x {n} rows", *repeated(function, times, arguments))


# ---- the multi-step integrator of the examples


def integrator_arguments(rows: int) -> tuple[Any, Array, Array]:
    integrator = example.make(corrected=True)
    torques = 0.5 * jnp.sin(0.1 * jnp.arange(rows + example.ORDER, dtype=jnp.float32))
    return integrator, 0.1 * jnp.ones((example.ORDER, 2)), torques


def scanned(integrator: Any, past: Array, torques: Array) -> Array:
    """The states, by a scan with the window in the carry."""
    weights = jnp.asarray(example.adams_bashforth(example.ORDER)[::-1], jnp.float32)

    def step(carry: Any, torque: Array) -> Any:
        state, slopes = carry
        state = state + integrator.size * (weights @ slopes + integrator.correction(state, slopes))
        slopes = jnp.concatenate([slopes[1:], integrator.slope(state, torque)[None]])
        return (state, slopes), state

    slopes = jax.vmap(integrator.slope)(past, torques[: len(past)])
    return lax.scan(step, (past[-1], slopes), torques[len(past) :])[1]


def integrators() -> Group:
    """With the number of steps known at run time, and with a constant one by hand."""
    integrator, past, torques = integrator_arguments(LONG)
    arrays, rest = eqx.partition(integrator, eqx.is_array)

    def gradient(forecast: Callable[..., Array]) -> Callable[..., Any]:
        return jax.grad(lambda arrays, past, n: (forecast(eqx.combine(arrays, rest), past, n) ** 2).sum())

    programs = {LAX_SCAN: lambda f, past, n: scanned(f, past, torques)}
    kinds = {"loopax": lx.Auto(), "loopax Bounded()": lx.Bounded(), "loopax Checkpointed()": lx.Checkpointed()}
    for name, kind in kinds.items():
        programs[name] = lambda f, past, n, kind=kind: replace(f, kind=kind)(past, torques, n)
    cases = [Case(name, gradient(f), (arrays, past, jnp.int32(LONG))) for name, f in programs.items()]
    targets = [
        Target("time", "loopax Bounded()", LAX_SCAN, 1.3),
        Target("temporary memory", "loopax Bounded()", LAX_SCAN, 0.2, "temporary_mib"),
    ]
    return Group(
        f"Histories and buffers: gradient of the multi-step integrator, {LONG} steps", cases, targets, rounds=9
    )


def compilations() -> dict[str, int]:
    """Of one compiled function in which the number of steps takes ten values."""
    integrator, past, torques = integrator_arguments(SHORT)
    traces = []

    @eqx.filter_jit
    def gradient(integrator: Any, n: Array) -> Any:
        traces.append(n)
        return eqx.filter_grad(lambda f: (f(past, torques, n) ** 2).sum())(integrator)

    for n in range(10):
        gradient(integrator, jnp.int32(20 * n))
    return {"gradient of the multi-step integrator": len(traces)}


def groups() -> list[Group]:
    """All tables."""
    return [one_series(), of_lanes(32, 1.5), of_lanes(16, None), integrators()]


def counts() -> list[Counts]:
    """What is counted once."""
    return [Counts("Histories and buffers: compilations for ten different lengths", compilations)]
