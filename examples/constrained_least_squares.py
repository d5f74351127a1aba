"""What is in a pixel? Non-negative least squares by an active-set method: two loops in each other, for 256 pixels.

A pixel's spectrum is a sum of few of 20 Gaussian spectra, with noise. The parts are the x >= 0 with the least misfit
|A x - b|^2. The outer loop lets the variable in that lowers the misfit most. The inner loop solves for the variables
that are in, and takes those out that would become negative, until none would. Pixels need different numbers of both.
In lockstep, an outer step of the batch waits for the pixel with the most inner steps, and all wait for the last pixel.
With `lanes="free"`, each pixel goes through both loops at its own pace.

All spectra are also shifted and widened, by the same unknown amounts. The parts of these pixels are known, as those of
samples from a laboratory. So a gradient through the solver finds shift and width: those with which the parts come out
right. It exists where the variables that are in stay the same. It is also the gradient of one more solve for these
variables, at the end, which costs less: the example measures both.

`python examples/constrained_least_squares.py` compares the parts with those of SciPy, calibrates, counts what a batch
evaluates, measures times, and draws `examples/constrained_least_squares.png`, in half a minute. It fails if parts,
gradients or the calibration are wrong, or if free lanes do not evaluate fewer inner steps than lanes in lockstep.

The method: C. L. Lawson and R. J. Hanson, "Solving Least Squares Problems", Prentice-Hall (1974), chapter 23.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jaxtyping import Array, Bool, Float, Int
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import loopax as lx

FIGURE = Path(__file__).with_suffix(".png")

PIXELS, BANDS, SPECTRA = 256, 100, 20
MOST, NOISE, SEED = 8, 0.01, 0  # the parts that a pixel may have, and the noise of a band
SPACING = 1 / SPECTRA  # of the spectra's centres, in a range of wavelengths from 0 to 1
TRUE = np.array([0.2, 1.1])  # shift and width of the spectra, in units of the spacing
GUESS = np.array([0.0, 1.0])
ENTERS = 1e-10  # a slope of the misfit that lets a variable in, relative to the largest at the start
OUTER, INNER = 3 * SPECTRA, SPECTRA + 1  # steps that the loops may take
TIMES = 5
ENOUGH = 0.01  # an error of shift or width
ROUNDING = 1e-9

WAYS = LOCKSTEP, FREE, COMPACT, JAX = "lockstep", "free", "compact", "jax.lax"

Parts = Float[Array, " spectra"]
Loop = Callable[[Callable[[Any], Any], Callable[[Any], Any], Any], Any]  # as `jax.lax.while_loop`


# The solver ----------------------------------------------------------------------------------------------


class State(NamedTuple):
    """The parts, whether each may be positive, and steps of the inner loop, by the step of the outer one."""

    x: Parts
    passive: Bool[Array, " spectra"]
    counts: tuple[Int[Array, ""], Int[Array, " outer"]] | None = None


def solve(gram: Array, projected: Parts, passive: Array) -> Parts:
    """The least-squares solution for the passive variables; the others are 0."""
    matrix = jnp.where(passive[:, None] & passive[None], gram, jnp.eye(len(gram)))
    return jax.scipy.linalg.solve(matrix, jnp.where(passive, projected, 0.0), assume_a="pos")


def nnls(gram: Array, projected: Parts, outer: Loop, inner: Loop, is_counted: bool = False) -> State:
    """The x >= 0 with the least |A x - b|^2, for A^T A and A^T b."""

    def slopes(state: State) -> Parts:
        return jnp.where(state.passive, -jnp.inf, projected - gram @ state.x)

    def lowers(state: State) -> Array:
        return slopes(state).max() > ENTERS * jnp.abs(projected).max()

    def let_in(state: State) -> State:
        enters = jnp.arange(len(gram)) == slopes(state).argmax()
        first = state._replace(passive=state.passive | enters), jnp.bool_(False)
        state, _ = inner(lambda pair: ~pair[1], lambda pair: take_out(pair[0]), first)
        return state._replace(counts=state.counts and (state.counts[0] + 1, state.counts[1]))

    def take_out(state: State) -> tuple[State, Array]:
        """Solve, go as far as no variable becomes negative, and take those out that are 0 then."""
        x, passive, counts = state
        solution = solve(gram, projected, passive)
        falls = passive & (solution <= 0)
        ratios = jnp.where(falls, x / jnp.where(x > solution, x - solution, 1.0), 1.0)
        there = jnp.where(falls & (ratios <= ratios.min()), 0.0, x + ratios.min() * (solution - x))
        is_feasible = ~falls.any()
        counts = counts and (counts[0], counts[1].at[counts[0]].add(1))
        return State(jnp.where(is_feasible, solution, there), passive & ~(falls & (there <= 0)), counts), is_feasible

    counts = (jnp.int32(0), jnp.zeros(OUTER, jnp.int32)) if is_counted else None
    return outer(lowers, let_in, State(jnp.zeros_like(projected), jnp.zeros(len(gram), bool), counts))


def unmix(spectra: Array, pixels: Array, lanes: Any, is_counted: bool = False) -> State:
    """The parts of all pixels. The loops are those of loopax, with bounds, or those of JAX."""
    outer = inner = jax.lax.while_loop
    if lanes != JAX:
        outer, inner = partial(lx.while_loop, max_steps=OUTER, lanes=lanes), partial(lx.while_loop, max_steps=INNER)
    return jax.vmap(lambda b: nnls(spectra.T @ spectra, b, outer, inner, is_counted))(pixels @ spectra)


# The calibration -----------------------------------------------------------------------------------------


def library(calibration: Float[Array, "2"]) -> Float[Array, "bands spectra"]:
    """The spectra with this shift and width."""
    shift, width = SPACING * calibration
    apart = jnp.linspace(0, 1, BANDS)[:, None] - SPACING * jnp.arange(0.5, SPECTRA)[None] - shift
    return jnp.exp(-0.5 * (apart / width) ** 2)


def problem(pixels: int = PIXELS) -> tuple[Float[Array, "pixels bands"], Float[Array, "pixels spectra"]]:
    """Noisy spectra of pixels, and their parts."""
    random = np.random.default_rng(SEED)
    ranks = random.random((pixels, SPECTRA)).argsort(1)
    parts = np.where(ranks < random.integers(1, MOST + 1, (pixels, 1)), random.uniform(0.2, 1, (pixels, SPECTRA)), 0.0)
    exact = parts @ np.asarray(library(jnp.asarray(TRUE))).T
    return jnp.asarray(exact + NOISE * random.standard_normal(exact.shape)), jnp.asarray(parts)


def error(calibration: Array, pixels: Array, parts: Array, lanes: str, is_solved_again: bool = False) -> Array:
    """The mean squared error of the parts, beside the noise. The last option: the derivative is of one more solve."""
    spectra = library(calibration)
    if is_solved_again:
        passive = unmix(jax.lax.stop_gradient(spectra), pixels, lanes).passive
        x = jax.vmap(partial(solve, spectra.T @ spectra))(pixels @ spectra, passive)
    else:
        x = unmix(spectra, pixels, lanes).x
    return ((x - parts) ** 2).mean() / NOISE**2


def calibrate(gradient: Any, pixels: Array, parts: Array) -> Any:
    """Shift and width, by L-BFGS."""

    def value(calibration: np.ndarray) -> Any:
        return jax.device_get(gradient(jnp.asarray(calibration), pixels, parts))

    return scipy.optimize.minimize(value, GUESS, jac=True, method="L-BFGS-B")


# The results ---------------------------------------------------------------------------------------------


def least_ms(programs: dict[str, Any], *args: Any) -> dict[str, float]:
    """The programs one after the other, some times, after a time that is not counted."""
    seconds = {name: [] for name in programs}
    for _ in range(TIMES + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * min(measured[1:]) for name, measured in seconds.items()}


def print_results(nested: dict[str, Any], times: dict[str, dict[str, float]]) -> None:
    """A row for each way to run the lanes."""
    columns, caption = ("lanes", "inner steps", "useful", *times), f"In brackets: the time beside that of {LOCKSTEP}"
    table = Table(*columns, title=f"Inner steps that {PIXELS} pixels evaluate, and ms", caption=caption)
    for name in WAYS:
        steps = [f"{nested[name].evaluations[0]}", f"{nested[name].useful[0]:.0%}"] if name in nested else ["", ""]
        ratios = [f"{ms[name]:.1f} ({ms[name] / ms[LOCKSTEP]:.2f})" if name in ms else "" for ms in times.values()]
        table.add_row(name, *steps, *ratios)
    Console().print(table)


def draw(pixel: Array, spectra: Array, x: Array, steps: Int[np.ndarray, "pixels outer"]) -> Figure:
    """A pixel and its parts, and the pixels that take a step of their own in each evaluation of the inner loop."""
    figure = Figure(figsize=(5, 5.4), layout="constrained", dpi=150)
    mixture, occupancy = figure.subplots(2, 1)
    at = np.linspace(0, 1, BANDS)
    for place, part in enumerate((spectra * x).T[np.asarray(x) > 0]):
        mixture.fill_between(at, part, alpha=0.4, color=f"C{place % 4}")
    mixture.plot(at, pixel, "k.", markersize=3, label="observed")
    mixture.plot(at, spectra @ x, "k", linewidth=1, label="sum of the parts")
    mixture.set(title="A pixel and its parts", xlabel="wavelength", ylabel="intensity")
    mixture.legend(frameon=False)
    of_batch = [(column[:, None] > np.arange(column.max())).sum(0) for column in steps.T]
    free = (steps.sum(1)[:, None] > np.arange(steps.sum(1).max())).sum(0)
    for name, active in ((LOCKSTEP, np.concatenate(of_batch)), (FREE, free)):
        occupancy.stairs(active, fill=True, alpha=0.5, label=name)
    occupancy.set(title="Pixels that take a step", xlabel="steps of the inner loop, of the batch", ylabel="pixels")
    occupancy.legend(frameon=False)
    return figure


def main() -> None:
    """Solve, calibrate, count, measure, draw."""
    jax.config.update("jax_enable_x64", True)
    pixels, parts = problem()
    guess, spectra = jnp.asarray(GUESS), library(jnp.asarray(TRUE))
    solvers = {name: jax.jit(partial(unmix, lanes=name)) for name in WAYS}
    through, again = (
        {name: jax.jit(jax.value_and_grad(partial(error, lanes=name, is_solved_again=last))) for name in WAYS[:2]}
        for last in (False, True)
    )
    times = {
        "forward": least_ms(solvers, spectra, pixels),
        "gradient": least_ms(through, guess, pixels, parts),
        "of one more solve": least_ms(again, guess, pixels, parts),
    }
    by_scipy = np.stack([scipy.optimize.nnls(np.asarray(spectra), pixel)[0] for pixel in np.asarray(pixels)])
    apart = max(float(abs(solver(spectra, pixels).x - by_scipy).max()) for solver in solvers.values())
    slopes = [gradient(guess, pixels, parts)[1] for gradient in (*through.values(), *again.values())]
    found = calibrate(through[FREE], pixels, parts)
    counts: Any = jax.jit(partial(unmix, lanes=FREE, is_counted=True))(spectra, pixels).counts
    report: Any = lx.lane_report(*counts)

    print_results({LOCKSTEP: report.nested, FREE: report.free}, times)
    steps, inner = report.steps, np.asarray(counts[1])
    print(f"steps of a pixel: outer {steps.min()}-{steps.max()}, inner {inner.sum(1).min()}-{inner.sum(1).max()}")
    print(f"parts of a pixel: {(by_scipy > 0).sum(1).mean():.1f} in the mean, true {(parts > 0).sum(1).mean():.1f}")
    print(f"largest difference from SciPy: {apart:.0e}")
    print(f"shift and width: {GUESS} -> {found.x.round(3)}, true {TRUE}, in {found.nfev} gradients")
    calibrated, shown = library(jnp.asarray(found.x)), int((parts > 0).sum(1).argmax())
    x = solvers[FREE](calibrated, pixels).x
    draw(pixels[shown], calibrated, x[shown], inner).savefig(FIGURE)
    print(f"Figure: {FIGURE.name}")
    assert apart < ROUNDING
    assert all(jnp.allclose(slope, slopes[0], rtol=ROUNDING) for slope in slopes)
    assert abs(found.x - TRUE).max() < ENOUGH
    assert report.free.evaluations[0] < report.nested.evaluations[0]


if __name__ == "__main__":
    main()
