"""Where will the planets be? Initial velocities fitted through 100 000 steps of a symplectic integrator.

The giant planets are observed for 50 years, twice a year, with noise. Their initial velocities are unknown: the first
guess comes from three observations, and is wrong by some per cent. A gradient goes back through all steps of the
leapfrog method, by its inverse: `loopax.Reversible` stores one state, whatever the number of steps. The number of steps
is known only at run time, so one compiled gradient serves the fit of the first 5 years and that of all 50.

`python examples/planets.py` fits, prints the errors before and after, and the memory of gradients of 1000 to 100 000
steps with three kinds, and draws `examples/planets.png`. It takes half a minute. It fails if the fit does not come
down to the noise, or if the memory grows.

Units are astronomical units, years and masses of the sun. Masses and distances are those of the IAU and JPL, rounded.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import loopax as lx

FIGURE = Path(__file__).parent / "planets.png"

NAMES = ("Jupiter", "Saturn", "Uranus", "Neptune")
MASSES = np.array([9.55e-4, 2.86e-4, 4.37e-5, 5.15e-5])
DISTANCES = np.array([5.2, 9.55, 19.2, 30.1])
GRAVITY = 4 * np.pi**2
YEARS, STEPS, OBSERVATIONS = 50, 100_000, 100
EVERY, DT = STEPS // OBSERVATIONS, YEARS / STEPS
NOISE = 1e-3
HORIZONS = (STEPS // 10, STEPS)  # steps that are fitted, one after the other
ENOUGH = 1.1  # the misfit of the true velocities is about 1
OPTIMISER = optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(15))

Planets = Float[Array, "planets 2"]


# The integrator ------------------------------------------------------------------------------------------


def acceleration(q: Planets) -> Planets:
    """Of the planets, by the sun, which stays where it is, and by each other."""
    apart = q - q[:, None]
    distances = jnp.sqrt((apart**2).sum(-1) + jnp.eye(len(q)))
    by_others = (MASSES[:, None] * apart / distances[..., None] ** 3).sum(1)
    return GRAVITY * (by_others - q / jnp.sqrt((q**2).sum(-1, keepdims=True)) ** 3)


def leapfrog(q: Planets, v: Planets) -> tuple[Planets, Planets]:
    """A step."""
    q = q + 0.5 * DT * v
    v = v + DT * acceleration(q)
    return q + 0.5 * DT * v, v


def back(q: Planets, v: Planets) -> tuple[Planets, Planets]:
    """A step back."""
    q = q - 0.5 * DT * v
    v = v - DT * acceleration(q)
    return q - 0.5 * DT * v, v


def trajectory(q: Planets, v: Planets) -> Float[Array, "observations planets 2"]:
    """The positions at the times of the observations."""

    def half_a_year(state: Any, _: Any) -> Any:
        after = lx.fori_loop(0, EVERY, lambda _, s: leapfrog(*s), state)
        return after, after[0]

    return lx.scan(half_a_year, (q, v), length=OBSERVATIONS)[1]


def misfit(v: Planets, q: Planets, observed: Array, num_steps: Any, kind: lx.Kind | None = None) -> Array:
    """The mean squared error of the positions that were observed in so many steps, in units of the noise."""

    def step(i: Any, state: Any) -> Any:
        q, v, total = state
        q, v = leapfrog(q, v)
        is_time, place = (i + 1) % EVERY == 0, i // EVERY
        error = ((q - jax.lax.dynamic_index_in_dim(observed, place, keepdims=False)) ** 2).mean()
        return q, v, total + jnp.where(is_time, error, 0.0)

    # The sum of errors stays as it is on the way back: no derivative reads it.
    reversible = lx.Reversible(lambda _, state: (*back(*state[:2]), state[2]), rtol=1e-6)
    *_, total = lx.fori_loop(0, num_steps, step, (q, v, jnp.zeros(())), kind=kind or reversible)
    return total / (num_steps // EVERY) / NOISE**2


# The fit -------------------------------------------------------------------------------------------------


def problem() -> tuple[Planets, Planets, Array]:
    """Positions and velocities at the start, and noisy observations."""
    angles = jnp.array([0.3, 1.9, 4.0, 5.3])
    around = jnp.stack([jnp.cos(angles), jnp.sin(angles)], 1)
    q = jnp.asarray(DISTANCES)[:, None] * around
    across = jnp.stack([-around[:, 1], around[:, 0]], 1)
    v = jnp.sqrt(GRAVITY / DISTANCES)[:, None] * across * jnp.array([1.02, 0.98, 1.01, 0.99])[:, None]
    exact = jax.jit(trajectory)(q, v)
    return q, v, exact + NOISE * jax.random.normal(jax.random.key(0), exact.shape)


def first_guess(q: Planets, observed: Array) -> Planets:
    """The slope at the start of the parabola through the first three positions."""
    return (4 * observed[0] - observed[1] - 3 * q) / (2 * EVERY * DT)


@jax.jit
def improve(v: Planets, state: Any, q: Planets, observed: Array, num_steps: Any) -> tuple[Planets, Any, Array]:
    """A step of L-BFGS with a line search."""
    value = partial(misfit, q=q, observed=observed, num_steps=num_steps)
    loss, gradient = jax.value_and_grad(value)(v)
    updates, state = OPTIMISER.update(gradient, state, v, value=loss, grad=gradient, value_fn=value)
    return v + jnp.asarray(updates), state, loss


def fit(q: Planets, v: Planets, observed: Array, updates: int = 25) -> tuple[Planets, list[float]]:
    """The velocities, and the misfits on the way, of each horizon after the other."""
    misfits = []
    for num_steps in HORIZONS:
        state = OPTIMISER.init(v)
        for _ in range(updates):
            v, state, loss = improve(v, state, q, observed, jnp.int32(num_steps))
            misfits.append(float(loss))
            if loss < ENOUGH:
                break
    return v, misfits


def gradient_bytes(q: Planets, v: Planets, observed: Array) -> dict[str, list[int]]:
    """The temporary memory of gradients of 1000, 10 000 and 100 000 steps."""
    kinds = {"Reversible(inverse)": None, "Checkpointed()": lx.Checkpointed(), "Bounded()": lx.Bounded()}

    def temporary(kind: lx.Kind | None, steps: int) -> int:
        gradient = jax.jit(jax.grad(lambda v: misfit(v, q, observed, steps, kind)))
        analysis: Any = gradient.lower(v).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    return {name: [temporary(kind, steps) for steps in (1000, 10_000, 100_000)] for name, kind in kinds.items()}


def draw(observed: Array, before: Array, after: Array, stored: dict[str, list[int]]) -> Figure:
    """How far positions are from the observed ones, before and after the fit, and memory by the number of steps."""
    figure = Figure(figsize=(5, 6), layout="constrained")
    errors, memory = figure.subplots(2, 1, height_ratios=[3, 2])
    years = EVERY * DT * np.arange(1, OBSERVATIONS + 1)
    for place, name in enumerate(NAMES):
        guessed, fitted = (jnp.linalg.norm(x[:, place] - observed[:, place], axis=1) for x in (before, after))
        errors.semilogy(years, guessed, ":", color=f"C{place}")
        errors.semilogy(years, fitted, color=f"C{place}", linewidth=1, label=name)
    errors.axhline(NOISE, color="black", linewidth=1, label="noise")
    errors.set(xlabel="years", ylabel="AU", title="Distance from the observed position, first (dotted) and fitted")
    errors.legend(ncols=3, loc="upper left", frameon=False)
    errors.set_ylim(top=1e3)
    errors.yaxis.set_major_formatter("{x:g}")
    for name, sizes in stored.items():
        memory.loglog((1000, 10_000, 100_000), [size / 1024 for size in sizes], "o-", label=name)
    memory.set(xlabel="steps", ylabel="KiB", title="Temporary memory of a gradient")
    for axis in (memory.xaxis, memory.yaxis):
        axis.set_major_formatter("{x:g}")
    memory.legend(frameon=False)
    return figure


def main() -> None:
    """Fit, print and draw."""
    jax.config.update("jax_enable_x64", True)
    q, true, observed = problem()
    guess = first_guess(q, observed)
    fitted, misfits = fit(q, guess, observed)
    stored = gradient_bytes(q, guess, observed)
    table = Table("planet", "error of the first guess (AU/yr)", "after the fit", title="Initial velocities")
    for name, *errors in zip(NAMES, *(jnp.linalg.norm(v - true, axis=1) for v in (guess, fitted)), strict=True):
        table.add_row(name, *(f"{float(error):.1e}" for error in errors))
    console = Console()
    console.print(table)
    bytes_table = Table("kind", "1000 steps", "10 000", "100 000", title="Temporary memory of a gradient")
    for name, sizes in stored.items():
        bytes_table.add_row(name, *(f"{size / 1024:.1f} KiB" for size in sizes))
    console.print(bytes_table)
    console.print(f"misfit: {misfits[0]:.3g} -> {misfits[-1]:.3g} times the noise, in {len(misfits)} updates")
    before, after = (jax.jit(trajectory)(q, v) for v in (guess, fitted))
    draw(observed, before, after, stored).savefig(FIGURE, dpi=150)
    assert misfits[-1] < ENOUGH
    assert stored["Reversible(inverse)"][-1] <= 1.02 * stored["Reversible(inverse)"][0]


if __name__ == "__main__":
    main()
