"""Balls that jump down a cliff in gusts of wind: an adaptive solver with events, as three loops in each other.

The outer loop takes one bounce after another. In a flight, an inner loop takes adaptive steps of a Runge-Kutta method
until the ball has passed the ledge below it. Then Newton's method finds the time of the landing in the last step, in
a third loop. Ledges are of any height: most are low, some are deep, and each ball has its own. In lockstep, each bounce
waits for the ball with the deepest fall. With `lanes="free"`, no ball waits.

What is heard are the times of the bounces, with noise. The drag and the restitution of each ball are fitted to them,
by gradients in reverse mode through all three loops. The fit runs in lockstep: free lanes are faster forward, but
slower in the gradient of so cheap a step.

`python examples/bouncing_balls.py` prints how many iterations the batch takes both ways, and how long, fits, and draws
`examples/bouncing_balls.png`. It takes half a minute. It fails if the two ways differ, or if the fit does not find the
drags and restitutions.

Units are metres and seconds.
"""

import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import loopax as lx

FIGURE = Path(__file__).with_suffix(".png")

GRAVITY = 9.81
END, AT_REST = 120.0, 1.0  # the final time, and the speed below which a ball does not leave the ground
RTOL = 1e-4
MAX_TRIES, MAX_NEWTON = 512, 32
FREQUENCIES = np.geomspace(0.2, 6.0, 8)
GUSTS = 4 * FREQUENCIES ** (-1 / 3) / np.sqrt(len(FREQUENCIES))
PHASES = np.random.default_rng(1).uniform(0, 2 * np.pi, len(FREQUENCIES))

BALLS, LEDGES, BOUNCES = 64, 16, 24
NOISE = 1e-3
UPDATES, RATE = 80, 0.2
ENOUGH = 1.2  # the misfit of the true values is about 1
RIGHT = 0.1, 0.01  # the largest relative errors of drags and of restitutions
REPEATS = 5
WAYS = ("lockstep", "free")

Scalar = Float[Array, ""]


class Balls(NamedTuple):
    """What is fitted: one number of each for each ball, or those of one ball."""

    drag: Any  # 1/m
    restitution: Any  # the speed after a bounce over that before


# One ball --------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """Where a ball is."""

    t: Scalar
    y: Scalar  # above the ledge on which it will land
    v: Scalar  # upwards


class Flight(NamedTuple):
    """The carry of the inner loop."""

    now: Point
    before: Point  # the beginning of the last step
    dt: Scalar  # the step that is tried next
    tries: Int[Array, ""]  # steps of this flight, accepted or not


class Bounces(NamedTuple):
    """The bounces of a ball, one number of each for each bounce."""

    t: Scalar
    v: Scalar  # after the bounce
    tries: Int[Array, ""]


def acceleration(t: Scalar, v: Scalar, drag: Scalar) -> Scalar:
    against_wind = v - (GUSTS * jnp.sin(FREQUENCIES * t + PHASES)).sum()
    return -GRAVITY - drag * against_wind * jnp.abs(against_wind)


def step(p: Point, dt: Scalar, drag: Scalar) -> tuple[Point, Scalar]:
    """A step of Bogacki and Shampine's method, of order 3, and its error over the tolerance."""
    a1 = acceleration(p.t, p.v, drag)
    v2 = p.v + dt / 2 * a1
    a2 = acceleration(p.t + dt / 2, v2, drag)
    v3 = p.v + dt * 3 / 4 * a2
    a3 = acceleration(p.t + dt * 3 / 4, v3, drag)
    y = p.y + dt * (2 / 9 * p.v + v2 / 3 + 4 / 9 * v3)
    v = p.v + dt * (2 / 9 * a1 + a2 / 3 + 4 / 9 * a3)
    a4 = acceleration(p.t + dt, v, drag)
    error_y = dt * (5 / 72 * p.v - v2 / 12 - v3 / 9 + v / 8)
    error_v = dt * (5 / 72 * a1 - a2 / 12 - a3 / 9 + a4 / 8)
    error = jnp.maximum(jnp.abs(error_y) / (1 + jnp.abs(y)), jnp.abs(error_v) / (1 + jnp.abs(v))) / RTOL
    return Point(p.t + dt, y, v), error


def attempt(flight: Flight, drag: Scalar) -> Flight:
    """Keep the step if its error is small. What the error decides is not differentiated."""
    dt = jnp.minimum(flight.dt, END - flight.now.t)
    after, error = step(flight.now, dt, drag)
    error = lax.stop_gradient(error)
    growth = jnp.clip(0.9 * jnp.maximum(error, 1e-10) ** (-1 / 3), 0.2, 5.0)
    keep = partial(jnp.where, error <= 1)
    now, before = jax.tree.map(keep, (after, flight.now), (flight.now, flight.before))
    return Flight(now, before, lax.stop_gradient(dt * growth), flight.tries + 1)


def hermite(s: Scalar, start: Scalar, end: Scalar, rise: Scalar, rise_at_end: Scalar) -> Scalar:
    """The cubic with these values and slopes at 0 and 1."""
    return (1 - s) ** 2 * ((1 + 2 * s) * start + s * rise) + s**2 * ((3 - 2 * s) * end - (1 - s) * rise_at_end)


def landing(flight: Flight, drag: Scalar) -> tuple[Scalar, Scalar]:
    """The time and the speed at which the last step crosses the ledge; where it does not, those at its end."""
    a, b = flight.before, flight.now
    dt = b.t - a.t

    def goes_on(state: tuple[Scalar, Scalar]) -> Array:
        return (b.y <= 0) & (state[1] > 1e-8)

    def newton(state: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        height = partial(hermite, start=a.y, end=b.y, rise=dt * a.v, rise_at_end=dt * b.v)
        y, slope = jax.jvp(height, state[:1], (jnp.ones_like(dt),))
        return state[0] - y / slope, jnp.abs(y / slope)

    s, _ = lx.while_loop(goes_on, newton, (jnp.ones_like(dt), jnp.ones_like(dt)), max_steps=MAX_NEWTON)
    slopes = (dt * acceleration(p.t, p.v, drag) for p in (a, b))
    return a.t + s * dt, hermite(s, a.v, b.v, *slopes)


def fall(ledges: Float[Array, " bounces"], ball: Balls, lanes: Any = "free") -> tuple[Bounces, lx.LoopInfo]:
    """All bounces of a ball, until the final time or until it is at rest; `lanes` is that of the outermost loop."""

    def in_air(flight: Flight) -> Array:
        return ((flight.now.y > 0) | (flight.now.v > 0)) & (flight.now.t < END)

    def bounce(state: tuple[Flight, lx.Buffer]) -> tuple[Flight, lx.Buffer]:
        flight, found = state
        flight = flight._replace(tries=jnp.zeros((), jnp.int32))
        flight = lx.while_loop(in_air, lambda f: attempt(f, ball.drag), flight, max_steps=MAX_TRIES)
        t, v = landing(flight, ball.drag)
        v = -ball.restitution * v
        found = found.append(Bounces(t, v, flight.tries))
        below = ledges[jnp.minimum(found.count, len(ledges) - 1)]
        return flight._replace(now=Point(t, below, v)), found

    def goes_on(state: tuple[Flight, lx.Buffer]) -> Array:
        now, count = state[0].now, state[1].count
        return (now.t < END) & ((now.y > 0) | (now.v > AT_REST)) & (count < len(ledges))

    zero = jnp.zeros_like(ledges[0])
    start = Point(zero, ledges[0], zero)
    flight = Flight(start, start, zero + 0.01, jnp.zeros((), jnp.int32))
    found = lx.Buffer(len(ledges), like=Bounces(zero, zero, flight.tries))
    (_, found), info = lx.while_loop(goes_on, bounce, (flight, found), max_steps=len(ledges), info=True, lanes=lanes)
    return found.rows, info


# The fit -----------------------------------------------------------------------------------------------------


def from_numbers(numbers: Any) -> Balls:
    """Any two numbers give a drag and a restitution."""
    return Balls(jnp.exp(numbers[0]), jax.nn.sigmoid(numbers[1]))


def misfit(numbers: Any, ledges: Array, times: Array, count: Array, lanes: Any) -> Array:
    """The mean squared error of the times between the bounces of all balls, in units of the noise."""

    def of_ball(numbers: Any, ledges: Array, times: Array, count: Array) -> Array:
        found, info = fall(ledges, from_numbers(numbers), lanes)
        both = jnp.arange(len(times), dtype=jnp.int32) < jnp.minimum(count, info.num_steps)
        errors = jnp.diff(found.t - times, prepend=0.0) / NOISE
        return jnp.mean(errors**2, where=both) / 2  # an interval has the noise of two times

    return jax.vmap(of_ball)(numbers, ledges, times, count).mean()


def problem(balls: int = BALLS, ledges: int = LEDGES, bounces: int = BOUNCES) -> tuple[Balls, Array]:
    """The balls, and the depths that they fall: the last ones are of the flat ground at the foot of the cliff."""
    random = np.random.default_rng(0)
    depths = np.minimum(0.3 * random.uniform(size=(balls, bounces)) ** (-1 / 0.6), 100.0)  # Pareto's distribution
    depths *= np.arange(bounces) < random.integers(ledges // 2, ledges + 1, (balls, 1))
    drag, restitution = 0.03 * np.exp(0.5 * random.normal(size=balls)), random.uniform(0.4, 0.8, balls)
    return Balls(jnp.asarray(drag), jnp.asarray(restitution)), jnp.asarray(depths)


def fit(gradient: Callable[..., Any], *arguments: Array) -> tuple[Balls, list[float]]:
    """The balls, and the misfits on the way, from the same first guess of all balls."""
    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, UPDATES), b1=0.8, b2=0.9)  # gradients fall by orders
    size = len(arguments[0])
    numbers = jnp.full(size, np.log(0.05)), jnp.zeros(size)
    state, misfits = optimiser.init(numbers), []

    @jax.jit
    def update(numbers: Any, state: Any, slopes: Any) -> tuple[Any, Any]:
        change, state = optimiser.update(slopes, state)
        return jax.tree.map(jnp.add, numbers, change), state

    for _ in range(UPDATES):
        value, slopes = gradient(numbers, *arguments)
        misfits.append(float(value))
        numbers, state = update(numbers, state, slopes)
    return from_numbers(numbers), misfits


def seconds(programs: list[Callable[[], Any]]) -> list[float]:
    """The least of some times of each, which take turns."""
    times = [
        [timeit.timeit(lambda f=f: jax.block_until_ready(f()), number=1) for f in programs] for _ in range(REPEATS)
    ]
    return np.min(times, axis=0).tolist()


def draw(balls: Balls, ledges: Array, rows: Bounces, tries: np.ndarray) -> Figure:
    """The heights of some balls, and how many balls are in the air in each iteration of the batch."""
    figure = Figure(figsize=(5, 6), layout="constrained", dpi=150)
    heights, occupancy = figure.subplots(2, 1, height_ratios=[3, 2])

    def path(start: Point, end: Scalar, drag: Scalar) -> Point:
        return lx.scan(lambda p, _: (step(p, (end - start.t) / 50, drag)[0], p), start, length=50)[1]

    for ball in range(4):
        count, depths = np.count_nonzero(tries[ball]), np.asarray(ledges[ball])
        begin, v = (jnp.concatenate([jnp.zeros(1), x[ball, : count - 1]]) for x in (rows.t, rows.v))
        flights = Point(begin, ledges[ball, :count], v)
        points = jax.vmap(path, (0, 0, None))(flights, rows.t[ball, :count], balls.drag[ball])
        ground = depths.sum() - depths.cumsum()[:count, None]
        heights.plot(np.ravel(points.t), np.ravel(points.y + ground), linewidth=1)
    heights.set(xlabel="seconds", ylabel="metres", title="Height of four balls")
    most, own = tries.max(0), tries.sum(1)
    in_lockstep = np.concatenate([(tries[:, j, None] > np.arange(n)).sum(0) for j, n in enumerate(most)])
    in_free = (own[:, None] > np.arange(own.max())).sum(0)
    for name, counts in zip(WAYS, (in_lockstep, in_free), strict=True):
        occupancy.stairs(counts, fill=True, alpha=0.7, label=f"{name}: {counts.mean() / len(tries):.0%} of the lanes")
    occupancy.set(xlabel="iterations", ylabel="balls", title="Balls that take a step")
    occupancy.set_ylim(top=1.4 * len(tries))
    occupancy.legend(frameon=False)
    return figure


def main() -> None:
    """Solve, fit, print and draw."""
    jax.config.update("jax_enable_x64", True)
    console, (true, ledges) = Console(), problem()
    forwards = [jax.jit(jax.vmap(partial(fall, lanes=lanes))) for lanes in WAYS]
    gradients = [jax.jit(jax.value_and_grad(partial(misfit, lanes=lanes))) for lanes in WAYS]
    (rows, info), (rows_free, _) = [forward(ledges, true) for forward in forwards]
    tries = np.asarray(rows.tries)
    noise = NOISE * np.random.default_rng(2).normal(size=rows.t.shape)
    arguments = ledges, rows.t + noise, info.num_steps

    fitted, misfits = fit(gradients[0], *arguments)
    numbers = jnp.log(true.drag), jax.scipy.special.logit(true.restitution)
    (value, slopes), (value_free, slopes_free) = [gradient(numbers, *arguments) for gradient in gradients]
    times = seconds([partial(f, ledges, true) for f in forwards] + [partial(g, numbers, *arguments) for g in gradients])

    report = lx.lane_report(info, tries)
    assert report.nested
    assert report.free
    table = Table("", *WAYS, "ratio", title=f"{BALLS} balls, {tries.sum(1).min()} to {tries.sum(1).max()} steps")
    counts = report.nested.iterations, report.free.iterations
    shown = {"iterations": counts, "seconds": times[:2], "seconds of a gradient": times[2:]}
    for name, (lockstep, free) in shown.items():
        table.add_row(name, f"{lockstep:.4g}", f"{free:.4g}", f"{free / lockstep:.2f}")
    console.print(table)
    errors = [jnp.abs(jnp.log(a / b)) for a, b in zip(fitted, true, strict=True)]
    for name, error in zip(Balls._fields, errors, strict=True):
        console.print(f"{name}: fitted within {float(jnp.median(error)):.1e} (median), {float(error.max()):.1e} (most)")
    console.print(f"misfit: {misfits[0]:.3g} -> {misfits[-1]:.3g}; of the true values {float(value):.3g}")
    draw(true, ledges, rows, tries).savefig(FIGURE)
    ours, theirs = jax.tree.leaves((rows_free, value_free, slopes_free)), jax.tree.leaves((rows, value, slopes))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * float(jnp.abs(b).max()))
    assert report.free.iterations < report.nested.iterations / 2
    assert misfits[-1] < ENOUGH
    assert all(error.max() < most for error, most in zip(errors, RIGHT, strict=True))


if __name__ == "__main__":
    main()
