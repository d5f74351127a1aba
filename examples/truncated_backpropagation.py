"""How far back must a gradient go? A recurrent network that forecasts a long series, with windows of several lengths.

The series are the currents of household appliances, recording after recording. A GRU forecasts the next value. It is
trained on stretches of 1000 steps: by backpropagation through all of them, and by truncated backpropagation, where
`loopax.Truncated(window=w)` cuts the derivative of the state before the steps w, 2w, 3w and so on. The loss of a step
is a row of the scan's ys.

`python examples/truncated_backpropagation.py` trains five times, prints the losses on recordings that were held out,
the memory and the time of updates, and the cosine between each gradient and the whole one, and draws
`examples/truncated_backpropagation.png`. It takes half a minute. It fails if windows of 20 steps do worse than the
whole gradient, if windows of one step do as well, or if the memory is not much smaller.

The data are PLAID, in the UCR Time Series Classification Archive (CC BY 4.0): J. Gao, S. Giri, E. C. Kara and M.
Bergés (2014). See `examples/data/README.md`.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import loopax as lx

HERE = Path(__file__).parent
DATA = HERE / "data" / "plaid.npz"
FIGURE = HERE / "truncated_backpropagation.png"

STEPS, SERIES, HIDDEN = 1000, 16, 32
UPDATES, EVERY, HALF_WAY = 160, 20, 80
HELD_OUT = 128  # series of the held-out recordings
WINDOWS = (100, 20, 5, 1)
WHOLE = "all steps"
WAYS: dict[str, int | None] = {WHOLE: None, **{f"window={w}": w for w in WINDOWS}}
CHECKPOINTED = "checkpoints"
STORED = lx.Residuals()  # of all steps, or of one window
OPTIMISER = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(3e-2))

Series = Float[Array, "steps series"]


# The data ------------------------------------------------------------------------------------------------


def load(path: Path = DATA) -> tuple[np.ndarray, np.ndarray]:
    """The recordings for training and those held out: end to end, in random order, each on a scale of its own."""
    with np.load(path) as file:
        values, lengths, is_train = file["values"][:, 0], file["lengths"], file["is_train"]
    recordings = [x / np.percentile(x, 98) for x in np.split(values, np.cumsum(lengths)[:-1])]
    order = np.random.default_rng(0).permutation(len(recordings))
    parts = ([recordings[i] for i in order if is_train[i] == chosen] for chosen in (True, False))
    train, test = (np.clip(np.concatenate(part), 0, 3).astype(np.float32) for part in parts)
    return train, test


def stretches(values: np.ndarray, number: int, steps: int = STEPS) -> list[Series]:
    """Batches of stretches from random places."""
    random = np.random.default_rng(1)
    starts = random.integers(0, len(values) - steps, (number, SERIES))
    return [jnp.asarray(np.stack([values[i : i + steps + 1] for i in row], 1)) for row in starts]


def side_by_side(values: np.ndarray, number: int = HELD_OUT) -> Series:
    """The whole as so many series."""
    return jnp.asarray(values[: len(values) // number * number].reshape(number, -1).T)


# The network ---------------------------------------------------------------------------------------------


class Forecaster(eqx.Module):
    """What a GRU says is added to the last value."""

    cell: eqx.nn.GRUCell
    change: eqx.nn.Linear

    def __init__(self, key: Array, hidden: int = HIDDEN) -> None:
        """With random weights."""
        of_cell, of_change = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(1, hidden, key=of_cell)
        self.change = eqx.nn.Linear(hidden, 1, key=of_change)

    def __call__(self, state: Array, value: Array) -> tuple[Array, Array]:
        """The next state, and a forecast of the next value."""
        state = self.cell(value[None], state)
        return state, value + self.change(state)[0]


def loss(network: Forecaster, series: Series, window: int | None, kind: lx.Kind = STORED) -> Array:
    """The mean squared error of forecasts. Each step's error is a row of ys, so each window differentiates its own."""

    def step(states: Array, values: Any) -> tuple[Array, Array]:
        value, following = values
        states, forecast = jax.vmap(network)(states, value)
        return states, ((forecast - following) ** 2).mean()

    start = jnp.zeros((series.shape[1], network.cell.hidden_size))
    derivative = None if window is None else lx.Truncated(window=window)
    return lx.scan(step, start, (series[:-1], series[1:]), kind=kind, derivative=derivative)[1].mean()


@jax.jit
def held_out_loss(network: Forecaster, series: Series) -> Array:
    """Of series that were not used in training."""
    return loss(network, series, None)


# Training ------------------------------------------------------------------------------------------------


class Progress(NamedTuple):
    """The network, the mean of its last versions, and what the optimiser keeps."""

    network: Forecaster
    mean: Forecaster
    optimiser: Any


class Training(NamedTuple):
    """What came out with a gradient."""

    program: Any  # an update, compiled
    kept: list[Progress]  # every so many updates
    losses: list[float]  # on held-out series, at the same times


def start(hidden: int = HIDDEN) -> Progress:
    """An untrained network: all trainings start from one."""
    network = Forecaster(jax.random.key(0), hidden)
    return Progress(network, network, OPTIMISER.init(eqx.filter(network, eqx.is_array)))


def update(window: int | None, kind: lx.Kind, progress: Progress, series: Series) -> tuple[Progress, Forecaster]:
    """A step of the optimiser, and the gradient."""
    gradient = jax.grad(loss)(progress.network, series, window, kind)
    change, optimiser = OPTIMISER.update(gradient, progress.optimiser)
    network = eqx.apply_updates(progress.network, change)
    mean = jax.tree.map(lambda new, old: old + 0.1 * (new - old), network, progress.mean)
    return Progress(network, mean, optimiser), gradient


def compiled(series: Series, window: int | None = None, kind: lx.Kind = STORED) -> Any:
    """An update as a program."""
    return jax.jit(partial(update, window, kind)).lower(start(), series).compile()


def mebibytes(program: Any) -> float:
    """The temporary memory of a program."""
    return program.memory_analysis().temp_size_in_bytes / 2**20


def train(program: Any, batches: Sequence[Series], test: Series) -> Training:
    """All updates, from the same start and with the same batches for all gradients."""
    progress, kept, losses = start(), [], []
    for i, series in enumerate(batches):
        progress, _ = program(progress, series)
        if (i + 1) % EVERY == 0:
            kept.append(progress)
            losses.append(float(held_out_loss(progress.mean, test)))
    return Training(program, kept, losses)


# What is measured ----------------------------------------------------------------------------------------


def milliseconds(programs: Sequence[Any], progress: Progress, series: Series, rounds: int = 15) -> list[float]:
    """The least time of an update of each program, which are called in turn."""
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for program, of_program in zip(programs, times, strict=True):
            before = time.perf_counter()
            jax.block_until_ready(program(progress, series))
            of_program.append(1e3 * (time.perf_counter() - before))
    return [min(of_program) for of_program in times]


def cosines(programs: Sequence[Any], progress: Progress, series: Series) -> list[float]:
    """Of the angles between the first program's gradient and that of each."""
    first, *rest = (jax.flatten_util.ravel_pytree(program(progress, series)[1])[0] for program in programs)
    return [float(first @ g / jnp.linalg.norm(first) / jnp.linalg.norm(g)) for g in (first, *rest)]


class Result(NamedTuple):
    """A row of the table."""

    losses: list[float]  # on held-out series, every so many updates
    equal_time: float  # the loss after the time in which the whole gradient makes all updates
    cosine: float
    mebibytes: float
    milliseconds: float


def compare(batches: Sequence[Series], test: Series) -> dict[str, Result]:
    """Train with each gradient, and measure. The whole gradient comes first, and last: again, from checkpoints."""
    trainings = {name: train(compiled(batches[0], window), batches, test) for name, window in WAYS.items()}
    whole = trainings[WHOLE]
    trainings[CHECKPOINTED] = whole._replace(program=compiled(batches[0], kind=lx.Checkpointed()))
    programs = [training.program for training in trainings.values()]
    at = whole.kept[HALF_WAY // EVERY - 1], batches[HALF_WAY]
    times, angles = milliseconds(programs, *at), cosines(programs, *at)

    def result(training: Training, milliseconds: float, cosine: float) -> Result:
        number = times[0] / milliseconds * len(training.losses)
        equal_time = float(np.interp(number, range(1, len(training.losses) + 1), training.losses))
        return Result(training.losses, equal_time, cosine, mebibytes(training.program), milliseconds)

    rows = zip(trainings.values(), times, angles, strict=True)
    return dict(zip(trainings, (result(*row) for row in rows), strict=True))


def linear_regression(train: np.ndarray, test: np.ndarray, order: int = 32) -> float:
    """The mean squared error of forecasts that are linear in the last values."""

    def rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        past = np.lib.stride_tricks.sliding_window_view(values[:-1], order)
        return np.column_stack([past, np.ones(len(past))]), values[order:]

    inputs, outputs = rows(train)
    weights = np.linalg.lstsq(inputs, outputs, rcond=None)[0]
    inputs, outputs = rows(test)
    return float(((inputs @ weights - outputs) ** 2).mean())


# What is shown -------------------------------------------------------------------------------------------


def draw(results: dict[str, Result]) -> Figure:
    """Losses on held-out series by updates; memory, and the angle to the whole gradient, by window."""
    figure = Figure(figsize=(5, 7), layout="constrained")
    losses, angles, memory = figure.subplots(3, 1, height_ratios=[4, 3, 3])
    shown = {name: result for name, result in results.items() if name in WAYS}
    for name, result in shown.items():
        updates = EVERY * np.arange(1, len(result.losses) + 1)
        losses.semilogy(updates, result.losses, label=name, color="black" if name == WHOLE else None)
    losses.set(xlabel="updates", ylabel="mean squared error", title="Loss on held-out series")
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter("{x:g}")
    losses.legend(frameon=False)
    lengths = [STEPS, *WINDOWS]
    angles.semilogx(lengths, [result.cosine for result in shown.values()], "o-")
    angles.set(title="Cosine of a gradient and the whole one", ylim=(0.8, 1.02))
    memory.loglog(lengths, [result.mebibytes for result in shown.values()], "o-")
    memory.set(title="Temporary memory of an update, MiB", xlabel="steps in a window", ylim=(0.1, 30))
    for axes in (angles, memory):
        axes.set_xticks(lengths, map(str, lengths))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
    return figure


def table(results: dict[str, Result]) -> Table:
    """A row for each gradient."""
    columns = ("gradient", f"loss, {UPDATES} updates", "loss, equal time", "cosine", "MiB", "ms per update")
    rows = Table(*columns, title="Errors of forecasts on held-out series, and what updates cost")
    for name, (losses, equal_time, *costs) in results.items():
        numbers = [f"{losses[-1]:.5f}", f"{equal_time:.5f}"]
        rows.add_row(name, *numbers, *(f"{x:.{n}f}" for x, n in zip(costs, (3, 2, 1), strict=True)))
    return rows


def check(results: dict[str, Result], linear: float) -> None:
    """What the page says."""
    whole, large, middle, small, one, checkpoints = results.values()
    assert whole.losses[-1] < linear
    assert large.losses[-1] < 1.05 * whole.losses[-1]
    assert middle.losses[-1] < 1.05 * whole.losses[-1]
    assert one.losses[-1] > 1.4 * whole.losses[-1]
    assert middle.cosine > 0.99
    assert large.cosine > middle.cosine > small.cosine > one.cosine
    assert checkpoints.cosine > 0.9999
    assert checkpoints.mebibytes < middle.mebibytes < whole.mebibytes / 15
    assert middle.mebibytes < one.mebibytes < whole.mebibytes


def main() -> None:
    """Train, print, draw and check."""
    values, held_out = load()
    batches, test = stretches(values, UPDATES), side_by_side(held_out)
    results = compare(batches, test)
    console = Console()
    console.print(table(results))
    linear, last = linear_regression(values, held_out), float(((test[1:] - test[:-1]) ** 2).mean())
    console.print(f"linear regression on the last 32 values: {linear:.5f}; the last value: {last:.5f}")
    draw(results).savefig(FIGURE, dpi=150)
    check(results, linear)


if __name__ == "__main__":
    main()
