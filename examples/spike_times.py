"""Neurons that fire where their voltage crosses a threshold, and are recovered from the times at which they do.

A neuron charges in a current that swings, leaks, and tires: each spike leaves a brake behind, which decays. Between two
spikes, an inner loop takes steps of a Runge-Kutta method until the next one would cross the threshold. Newton's method
finds how long that last step has to be, in a second loop whose derivative is the implicit one. The outer loop goes on
from the voltage after the spike, until the end of the recording. Each neuron of the batch fires at times of its own,
and as often as it does.

What is known are the spikes, with a noise of 0.1 ms. The drive and the brake of each neuron are found
from them by Gauss-Newton steps, whose Jacobian is that of the spike times. A loop that only counts its steps would have
no derivative here: the number of steps does not change when a parameter does, by a little.

`python examples/spike_times.py` prints how well they are found, and how the derivatives agree with differences, and
draws `examples/spike_times.png`. It takes half a minute. It fails if either is not as good as it should be.

Times are in milliseconds, and voltages in units of the threshold.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from rich.console import Console

import loopax as lx

FIGURE = Path(__file__).with_suffix(".png")

END, DT = 300.0, 0.5  # of a recording, and of a step
NEURONS, MOST_SPIKES = 64, 64
PERIODS, SWINGS = np.array([11.0, 29.0, 73.0]), np.array([0.1, 0.15, 0.1])  # of the current
TAU, BRAKE_TIME = 12.0, 40.0  # in which a voltage and a brake fall to 1/e
NOISE, UPDATES, DAMPING = 0.1, 28, 1e-3
RIGHT = 0.05  # the largest error of a drive, relative

Scalar = Float[Array, ""]


class Neuron(NamedTuple):
    """What is to be found: one number of each for each neuron, or those of one."""

    drive: Any  # the mean current
    brake: Any  # what a spike adds to it


class State(NamedTuple):
    """Of a neuron."""

    t: Scalar
    voltage: Scalar
    brake: Scalar


# One neuron ------------------------------------------------------------------------------------------------


def slope(neuron: Neuron, state: State) -> State:
    current = neuron.drive * (1 + (SWINGS * jnp.sin(2 * np.pi * state.t / PERIODS)).sum())
    charge = (current - state.voltage - state.brake) / TAU
    return State(jnp.ones_like(state.t), charge, -state.brake / BRAKE_TIME)


def step(neuron: Neuron, state: State, h: Scalar) -> State:
    """One step of the classical Runge-Kutta method, of this length."""

    def behind(part: float, change: State) -> State:
        return jax.tree.map(lambda x, dx: x + part * h * dx, state, change)

    a = slope(neuron, state)
    b = slope(neuron, behind(0.5, a))
    c = slope(neuron, behind(0.5, b))
    d = slope(neuron, behind(1.0, c))
    return behind(1 / 6, jax.tree.map(lambda a, b, c, d: a + 2 * b + 2 * c + d, a, b, c, d))


def until_threshold(neuron: Neuron, state: State) -> State:
    """The state when the voltage crosses the threshold; one behind the end if it does not before."""
    dt = jnp.full_like(state.t, DT)

    def goes_on(both: tuple[State, State]) -> Array:
        _, ahead = both
        return (ahead.voltage < 1) & (ahead.t < END + DT)

    def advance(both: tuple[State, State]) -> tuple[State, State]:
        _, ahead = both
        return ahead, step(neuron, ahead, dt)

    state, ahead = lx.while_loop(goes_on, advance, (state, step(neuron, state, dt)), max_steps=round(END / DT) + 2)

    crosses = ahead.voltage >= 1

    def above(h: Scalar) -> Scalar:
        """The threshold. Without a crossing, the step has its whole length."""
        return jnp.where(crosses, step(neuron, state, h).voltage - 1, h - dt)

    def newton(found: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        h, _ = found
        voltage, rise = jax.jvp(above, (h,), (jnp.ones_like(h),))
        better = jnp.clip(h - voltage / rise, -dt, 2 * dt)  # the crossing is inside
        return better, jnp.abs(better - h)

    h, _ = lx.while_loop(
        lambda found: found[1] > 1e-12,
        newton,
        (dt, jnp.full_like(dt, jnp.inf)),
        max_steps=50,
        derivative=lx.Implicit(fixed_point=lambda found: found[0]),
    )
    return step(neuron, state, h)


def spikes(neuron: Neuron) -> tuple[Float[Array, " most"], Int[Array, ""]]:
    """The times at which a neuron fires before the end, and how many there are."""

    def fire(state: tuple[State, lx.Buffer]) -> tuple[State, lx.Buffer]:
        neuron_state, times = state
        at = until_threshold(neuron, neuron_state)
        after = State(at.t, jnp.zeros_like(at.voltage), at.brake + neuron.brake)
        return after, times.append(at.t, when=at.t < END)

    zero = jnp.zeros_like(neuron.drive)
    start = State(zero, zero, zero), lx.Buffer(MOST_SPIKES, like=zero)
    _, times = lx.while_loop(lambda state: state[0].t < END, fire, start, max_steps=MOST_SPIKES, lanes="compact")
    return times.rows, times.count


def last_spike(neuron: Neuron) -> Scalar:
    """When it is."""
    times, count = spikes(neuron)
    return times[count - 1]


# The fit ---------------------------------------------------------------------------------------------------


def problem(neurons: int = NEURONS) -> Neuron:
    """Neurons that fire seldom, and neurons that fire often."""
    random = np.random.default_rng(0)
    drive, brake = random.uniform(1.4, 2.5, neurons), random.uniform(0.05, 0.4, neurons)
    return Neuron(jnp.asarray(drive), jnp.asarray(brake))


def gauss_newton(
    recorded: Float[Array, " most"], count: Int[Array, ""]
) -> Callable[[Float[Array, "2"]], tuple[Float[Array, "2"], Scalar]]:
    """A damped step for the logarithms of a neuron's numbers, and the misfit before it, in units of the noise.

    So many spikes are fitted, the first ones.
    """

    def errors(numbers: Float[Array, "2"]) -> tuple[Any, Any]:
        times, number = spikes(Neuron(*jnp.exp(numbers)))
        both = jnp.arange(MOST_SPIKES, dtype=number.dtype) < jnp.minimum(number, count)
        found = jnp.where(both, (times - recorded) / NOISE, 0.0)
        return found, found

    def update(numbers: Float[Array, "2"]) -> tuple[Float[Array, "2"], Scalar]:
        jacobian, found = jax.jacfwd(errors, has_aux=True)(numbers)
        curvature = jacobian.T @ jacobian
        damped = curvature + DAMPING * jnp.diag(jnp.diag(curvature)) + 1e-9 * jnp.eye(2)
        change = jnp.clip(jnp.linalg.solve(damped, jacobian.T @ found), -0.2, 0.2)
        return numbers - change, (found**2).sum() / count

    return update


def fit(recorded: Float[Array, "neurons most"], counts: Int[Array, " neurons"]) -> tuple[Neuron, float]:
    """The neurons, and their median misfit, from the same first guess of all."""
    update = jax.jit(jax.vmap(lambda numbers, *of_neuron: gauss_newton(*of_neuron)(numbers)))
    misfits, numbers = jnp.zeros(0), jnp.tile(jnp.log(jnp.array([1.8, 0.2])), (len(counts), 1))
    for i in range(UPDATES):
        # The first spike first, which knows no brake: a bad guess is many spikes off after a while.
        numbers, misfits = update(numbers, recorded, jnp.minimum(counts, 2 ** (i // 4)))
    return Neuron(*jnp.exp(numbers).T), float(jnp.median(misfits))


def draw(times: np.ndarray, counts: np.ndarray, true: Neuron, found: Neuron) -> Figure:
    """The spikes of some neurons, and what was found of all."""
    figure = Figure(figsize=(5, 6), layout="constrained", dpi=150)
    raster, *of_all = figure.subplots(3, 1)
    shown = np.argsort(counts)[:: len(counts) // 4][:4]
    raster.eventplot([times[i, : counts[i]] for i in shown], linelengths=0.7)
    raster.set(xlabel="milliseconds", yticks=[], title="Spikes of four neurons")
    for axes, name, a, b in zip(of_all, Neuron._fields, true, found, strict=True):
        axes.plot(np.asarray(a), np.asarray(b), ".")
        axes.axline((a[0], a[0]), slope=1, color="gray", linewidth=0.7)
        axes.set(xlabel=f"{name} of a neuron", ylabel=f"{name} that is found")
    return figure


def main() -> None:
    """Record, fit, print and draw."""
    jax.config.update("jax_enable_x64", True)
    console, true = Console(), problem()
    times, counts = jax.jit(jax.vmap(spikes))(true)
    noise = NOISE * np.random.default_rng(1).normal(size=times.shape)
    found, misfit = fit(times + noise, counts)

    one = jax.tree.map(lambda x: x[0], true)
    last, gradient = jax.jit(last_spike), jax.jit(jax.grad(last_spike))(one)
    h = 1e-6
    differences = [
        float(last(one._replace(**{name: x + h})) - last(one._replace(**{name: x - h}))) / (2 * h)
        for name, x in one._asdict().items()
    ]
    agreement = max(abs(a / b - 1) for a, b in zip(gradient, differences, strict=True))

    console.print(f"{NEURONS} neurons fire {counts.min()} to {counts.max()} times in {END:.0f} ms")
    console.print(f"the last spike's derivatives agree with differences within {agreement:.0e}")
    errors = {name: jnp.abs(a / b - 1) for name, a, b in zip(Neuron._fields, found, true, strict=True)}
    for name, error in errors.items():
        console.print(f"{name}: found within {float(jnp.median(error)):.1e} (median), {float(error.max()):.1e} (most)")
    console.print(f"the median misfit is {misfit:.2f} of the noise")
    draw(np.asarray(times), np.asarray(counts), true, found).savefig(FIGURE)
    assert agreement < 1e-6
    assert errors["drive"].max() < RIGHT


if __name__ == "__main__":
    main()
