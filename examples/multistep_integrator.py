"""How will the pendulum swing? A classical multi-step method with a learned correction, trained by its own rollout.

Adams and Bashforth integrate a polynomial through the last few slopes. Here that sum has one more term, a small
network that looks at the same window: for what a long step gets wrong, and for what the equation of the pendulum
leaves out. The whole time evolution is one method under `eqx.filter_jit`: `loopax.rollout` repeats a step on its own
results, a `loopax.History` holds the points that it looks back on, and the number of steps is known at run time only.

`python examples/multistep_integrator.py` trains on forecasts of 6 steps, prints the errors on swings of controllers
that were not used in training, up to four times as far ahead, and draws `examples/multistep_integrator.png`. It fails
if the correction does not help at each of these horizons.

The data are measurements of a real pendulum with a motor (BSD 3-Clause): F. Wiebe et al., "Torque-limited simple
pendulum", Journal of Open Source Software 7 (2022). See `examples/data/README.md`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import loopax as lx

HERE = Path(__file__).parent
DATA = HERE / "data" / "pendulum.npz"
FIGURE = HERE / "multistep_integrator.png"

SAMPLES = 4  # measurements in a step
STEP = 0.02 * SAMPLES  # seconds
ORDER = 3
TRAINED, HORIZONS = 6, (6, 12, 18, 24)  # steps
TEST_RUNS = ("direct_collocation", "sac")
SCALE = jnp.array([1.0, 5.0])  # of angles (rad) and angular velocities (rad/s)
UPDATES, LEARNING_RATE, SEED = 300, 3e-3, 0


# The integrator ------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A point of a trajectory."""

    state: Float[Array, "*points d"]
    slope: Float[Array, "*points d"]


def adams_bashforth(order: int) -> np.ndarray:
    """The weights of the slopes at 0, -1, -2, ..., with which polynomials of degree < order are integrated from 0 to 1.

    That is the definition: one linear equation for each power (Hairer, Nørsett & Wanner 1993, section III.1).
    """
    powers = np.arange(order)
    return np.linalg.solve(np.vander(-powers, order, increasing=True).T, 1 / (powers + 1))


class Integrator(eqx.Module):
    """Adams-Bashforth, with a correction or without."""

    slope: Callable[[Array, Any], Array]  # the right-hand side: of a state and an input
    correction: Callable[[Array, Array], Array] | None  # to the slope: of a state and the window of slopes
    order: int = eqx.field(static=True)
    size: float = eqx.field(static=True)
    kind: lx.Kind = eqx.field(static=True, default=lx.Auto())  # what a gradient stores

    def step(self, _: None, u: Any, *, history: lx.History) -> tuple[None, Point]:
        """The next point. There is no other state than the history."""
        state, slopes = history[-1].state, history.rows.slope
        mean = jnp.asarray(adams_bashforth(self.order)[::-1], slopes.dtype) @ slopes
        if self.correction is not None:
            mean = mean + self.correction(state, slopes)
        state = state + self.size * mean
        return None, Point(state, self.slope(state, u))

    @eqx.filter_jit
    def __call__(
        self, past: Float[Array, "order d"], inputs: Float[Array, " order+rows"], length: Any
    ) -> Float[Array, "rows d"]:
        """Go on from `order` states, for `length` steps. Inputs are given for these states and for what comes."""
        before, inputs = inputs[: self.order], inputs[self.order :]
        history = lx.History(self.order, Point(past, jax.vmap(self.slope)(past, before)))
        return lx.rollout(self.step, None, length, inputs=inputs, history=history, kind=self.kind).outputs.state


class Pendulum(eqx.Module):
    """The equation of motion of an angle (0: hanging) and its velocity, under a torque."""

    gain: Array  # 1 / inertia
    gravity: Array
    damping: Array

    def __call__(self, state: Float[Array, " 2"], torque: Float[Array, ""]) -> Float[Array, " 2"]:
        """The velocity and the acceleration."""
        angle, velocity = state
        return jnp.stack([velocity, self.gain * torque - self.gravity * jnp.sin(angle) - self.damping * velocity])


class Correction(eqx.Module):
    """An acceleration, of the state and the last accelerations, with the opposite sign for the mirror image."""

    mlp: eqx.nn.MLP

    def __init__(self, *, key: PRNGKeyArray) -> None:
        """Draw the weights."""
        self.mlp = eqx.nn.MLP(3 + ORDER, "scalar", 16, 2, jnp.tanh, key=key)

    def __call__(self, state: Float[Array, " 2"], slopes: Float[Array, "order 2"]) -> Float[Array, " 2"]:
        """Nothing is added to the velocity, which is the angle's slope by definition."""
        angle, velocity = state
        odd = jnp.concatenate([jnp.stack([jnp.sin(angle), velocity / 5]), slopes[:, 1] / 20])
        even = jnp.cos(angle)[None]
        here, mirrored = (self.mlp(jnp.concatenate([sign * odd, even])) for sign in (1, -1))
        return jnp.stack([jnp.zeros_like(angle), (here - mirrored) / 2])


def make(corrected: bool, seed: int = SEED) -> Integrator:
    """The integrator before training."""
    pendulum = Pendulum(jnp.array(5.0), jnp.array(20.0), jnp.array(0.1))
    return Integrator(pendulum, Correction(key=jax.random.key(seed)) if corrected else None, ORDER, STEP)


# The data ------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """Stretches of measurements: ORDER rows of the past, and up to the longest horizon of what came then."""

    states: Float[Any, "windows rows 2"]
    torques: Float[Any, "windows rows"]
    lengths: Int[Any, " windows"]  # rows after the past that were measured; then zeros


def load(path: Path = DATA) -> tuple[Windows, Windows]:
    """All windows that are long enough to train on, of the runs for training and of those for the test."""
    with np.load(path) as file:
        runs = dict(zip(file["names"].tolist(), np.split(file["values"], file["lengths"].cumsum()[:-1]), strict=True))
    test = [runs.pop(name) for name in TEST_RUNS]
    return cut(list(runs.values())), cut(test)


def thin(run: Float[np.ndarray, "samples 3"]) -> Float[np.ndarray, "steps 3"]:
    """The angle and the velocity at the start of each step, and the mean torque in it."""
    steps = run[: len(run) // SAMPLES * SAMPLES].reshape(-1, SAMPLES, 3)
    return np.concatenate([steps[:, 0, :2], steps[:, :, 2:].mean(axis=1)], axis=1)


def cut(runs: list[np.ndarray]) -> Windows:
    rows = ORDER + max(HORIZONS)
    thinned = [thin(run[i:]) for run in runs for i in range(SAMPLES)]
    windows = [run[i : i + rows] for run in thinned for i in range(len(run) - ORDER - TRAINED + 1)]
    padded = np.stack([np.pad(window, [(0, rows - len(window)), (0, 0)]) for window in windows])
    return Windows(padded[..., :2], padded[..., 2], np.array([len(window) - ORDER for window in windows]))


# Training and test ---------------------------------------------------------------------------------------


@eqx.filter_jit
def forecasts(integrator: Integrator, windows: Windows, length: Any) -> Float[Array, "windows rows 2"]:
    """The states after the past, of all windows."""
    return jax.vmap(integrator, (0, 0, None))(windows.states[:, :ORDER], windows.torques, length)


def loss(integrator: Integrator, windows: Windows) -> Float[Array, ""]:
    errors = forecasts(integrator, windows, TRAINED) - windows.states[:, ORDER:]
    return jnp.mean((errors[:, :TRAINED] / SCALE) ** 2)


def fit(integrator: Integrator, windows: Windows, updates: int = UPDATES) -> Integrator:
    """Train through the rollout."""
    optimiser = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, updates))
    state = optimiser.init(eqx.filter(integrator, eqx.is_array))

    @eqx.filter_jit
    def update(integrator: Integrator, state: Any) -> tuple[Integrator, Any]:
        gradient = eqx.filter_grad(loss)(integrator, windows)
        change, state = optimiser.update(gradient, state)
        return eqx.apply_updates(integrator, change), state

    for _ in range(updates):
        integrator, state = update(integrator, state)
    return integrator


def errors(integrator: Integrator | None, windows: Windows) -> list[float]:
    """The root mean square error of the angle (rad) at each horizon; without an integrator, of no change at all."""
    found = []
    for horizon in HORIZONS:
        kept = windows.lengths >= horizon
        now, then = windows.states[kept, ORDER - 1], windows.states[kept, ORDER + horizon - 1]
        guess = now if integrator is None else forecasts(integrator, windows, jnp.int32(horizon))[kept, horizon - 1]
        found.append(float(np.sqrt(np.mean((guess - then)[:, 0] ** 2))))
    return found


# The results ---------------------------------------------------------------------------------------------


def table(results: dict[str, list[float]]) -> Table:
    seconds = [f"{STEP * horizon:.1f} s" for horizon in HORIZONS]
    made = Table("error of the angle (rad)", *seconds, title="Forecasts of swings that were not used in training")
    for name, values in results.items():
        made.add_row(name, *(f"{value:.3f}" for value in values))
    return made


def draw(integrators: dict[str, Integrator], results: dict[str, list[float]], test: Windows) -> Figure:
    """The errors, and a forecast."""
    figure = Figure(figsize=(5, 5.6), layout="constrained", dpi=150)
    upper, lower = figure.subplots(2, 1, sharex=True)
    chosen = int(np.argmax(test.lengths >= max(HORIZONS)))
    seconds = STEP * np.arange(-ORDER + 1, max(HORIZONS) + 1)
    upper.axvspan(0, STEP * TRAINED, color="gray", alpha=0.15, linewidth=0, label="horizon of the training")
    lower.plot(seconds, test.states[chosen, :, 0], "k", linewidth=4, alpha=0.25, label="measured")
    for name, values in results.items():
        upper.plot(STEP * np.array(HORIZONS), values, "o-", label=name)
        if name in integrators:
            states = forecasts(integrators[name], test, max(HORIZONS))[chosen]
            lower.plot(seconds[ORDER:], states[:, 0], color=upper.lines[-1].get_color())
    upper.set(title="Error of the angle", ylabel="rad", yscale="log")
    upper.yaxis.set_major_formatter("{x:g}")
    lower.set(title=f"A swing of {TEST_RUNS[0]}".replace("_", " "), xlabel="seconds ahead", ylabel="angle, rad")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def main() -> None:
    """Train, test, draw."""
    train, test = load()
    names = {False: f"Adams-Bashforth {ORDER}, fitted", True: "the same with a learned correction"}
    integrators = {name: fit(make(corrected), train) for corrected, name in names.items()}
    results = {"no change": errors(None, test)} | {name: errors(f, test) for name, f in integrators.items()}
    Console().print(table(results))
    draw(integrators, results, test).savefig(FIGURE)
    plain, corrected = (np.array(results[name]) for name in names.values())
    if not (corrected < plain).all():
        raise SystemExit("the learned correction does not help")


if __name__ == "__main__":
    main()
