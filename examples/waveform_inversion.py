"""Full-waveform inversion: a gradient through more steps than memory holds, killed and resumed.

Sound goes into the ground at one shot after another, and receivers at the surface record what comes back. The velocity
of the ground is what makes a simulation record the same. Its gradient goes back through all time steps of the survey:
`loopax.durable.value_and_grad` keeps the states before chunks of steps on disk, within the memory that it is given.

The inversion is a loop over gradients, each with a directory of its own. When the script is killed and started again,
the gradients that are done are read, and the one that was interrupted goes on: the model ends with the same bits.

`python examples/waveform_inversion.py` inverts a small survey (96 x 96 cells, 6400 time steps) twice, once with a kill
in the middle, takes about a minute, and draws `examples/waveform_inversion.png`. It fails if the two models differ in
one bit, or if the misfit does not fall.

`python examples/waveform_inversion.py DIRECTORY` is the inversion alone: interrupt it with Ctrl-C, and call it again.
`python examples/waveform_inversion.py full` takes one gradient of a survey of 256 x 256 cells and 100 000 time steps
within 64 MiB of memory, with less and less disk; that takes about five minutes.

The ground is made up: water, sediments whose velocity grows with depth, a fault, and a lens of faster rock. The survey
is simulated, too, with the wave equation of constant density in two dimensions: second order in time, fourth in space.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from loopax import durable

FIGURE = Path(__file__).with_suffix(".png")

CELLS, SHOTS, STEPS_PER_SHOT = 96, 8, 800
SPACING, TIME_STEP = 10.0, 1.4e-3  # metres, seconds
PEAK = 8.0  # hertz, of the source
DEPTH = 4  # of sources and receivers, in cells
SPONGE = 16  # cells at the sides and below that absorb waves
ITERATIONS, RATE = 20, 40.0  # metres a second, of Adam
MEMORY = 16 << 20  # bytes of a gradient
CHUNK_STEPS = 100  # few, so that a small survey has many chunks; None: as many as take 0.2 seconds
KILLED_AT = 0.5  # of the iterations

Model = Float[Any, "depth width"]  # metres a second
Field = Float[Array, "depth width"]


class Step(NamedTuple):
    """A row of the survey."""

    place: Any  # int32: the column of the source
    amplitude: Any
    recorded: Any  # [width]


def ground() -> np.ndarray:
    """The true velocity."""
    y, x = np.mgrid[:CELLS, :CELLS] / CELLS
    depth = y + np.where(x > 0.55 + 0.2 * y, 0.06, 0.0) - 0.2  # below the water; the right side has slid up a fault
    velocity = 1700 + 900 * np.clip(depth, 0, None) + 120 * np.sin(30 * depth) * (depth > 0.05)
    velocity = np.where(((x - 0.4) / 0.18) ** 2 + ((y - 0.5) / 0.09) ** 2 < 1, 2600, velocity)
    return np.where(y < 0.15, 1500, velocity).astype(np.float32)


def first_guess() -> np.ndarray:
    """What is known before: the water, and a velocity that grows with depth."""
    y, _ = np.mgrid[:CELLS, :CELLS] / CELLS
    return np.where(y < 0.15, 1500, 1700 + 900 * np.clip(y - 0.2, 0, None)).astype(np.float32)


def sponge() -> np.ndarray:
    """What a field is multiplied with in each step."""
    sides = np.minimum(np.arange(CELLS), np.arange(CELLS)[::-1])
    outside = np.maximum(SPONGE - np.minimum(sides[None], np.arange(CELLS)[::-1, None]), 0) / SPONGE
    return np.exp(-0.1 * outside**2).astype(np.float32)


def laplacian(u: Field) -> Field:
    """In units of the spacing, of fourth order."""
    around = jnp.pad(u, 2)

    def at(i: int, j: int) -> Field:
        return around[2 + i : 2 + i + CELLS, 2 + j : 2 + j + CELLS]

    near = at(1, 0) + at(-1, 0) + at(0, 1) + at(0, -1)
    far = at(2, 0) + at(-2, 0) + at(0, 2) + at(0, -2)
    return -5 * u + 4 / 3 * near - far / 12


def propagate(
    velocity: Model, fields: tuple[Field, Field], x: Step
) -> tuple[tuple[Field, Field], Float[Array, " width"]]:
    """A time step, and what the receivers record."""
    now, before = fields
    courant = (velocity * (TIME_STEP / SPACING)) ** 2
    after = (2 * now - before + courant * laplacian(now)) * sponge()
    after = after.at[DEPTH, x.place].add(x.amplitude)
    return (after, now * sponge()), after[DEPTH]


def misfit(velocity: Model, fields: tuple[Field, Field], x: Step) -> tuple[tuple[Field, Field], Float[Array, ""]]:
    """A time step, and how far what is recorded is from what should be."""
    fields, recorded = propagate(velocity, fields, x)
    return fields, 0.5 * ((recorded - x.recorded) ** 2).sum()


def still() -> tuple[Field, Field]:
    """The fields before the first shot."""
    return jnp.zeros((CELLS, CELLS)), jnp.zeros((CELLS, CELLS))


def survey(directory: Path) -> Step:
    """All rows: shots from left to right, and what is recorded, which stays on disk."""
    times = np.arange(STEPS_PER_SHOT) * TIME_STEP - 1.5 / PEAK
    squared = (np.pi * PEAK * times) ** 2
    wavelet = ((1 - 2 * squared) * np.exp(-squared)).astype(np.float32)  # of Ricker
    places = np.linspace(SPONGE, CELLS - SPONGE - 1, SHOTS).astype(np.int32)
    shots = Step(np.repeat(places, STEPS_PER_SHOT), np.tile(wavelet, SHOTS), None)
    _, recorded = durable.scan(partial(propagate, jnp.asarray(ground())), still(), shots, directory=directory)
    return shots._replace(recorded=recorded)


def gradient(directory: Path, **options: Any) -> Callable[..., Any]:
    """The misfit of a model and its gradient: the same call goes on after a kill."""
    options = {"memory": MEMORY, "chunk_steps": CHUNK_STEPS, "argnums": 0} | options
    return durable.value_and_grad(total_misfit, misfit, directory=directory, **options)


def total_misfit(_: Model, fields: Any, total: Float[Array, ""]) -> Float[Array, ""]:
    """The loss: what the steps add up to."""
    del fields
    return total


class Result(NamedTuple):
    """What an inversion ends with."""

    velocity: np.ndarray
    misfits: list[float]


def invert(directory: Path) -> Result:
    """The inversion: the same call begins it, and goes on with it."""
    shots, optimizer = survey(directory / "survey"), optax.adam(RATE)
    velocity = jnp.asarray(first_guess())
    state, misfits = optimizer.init(velocity), []
    unknown = jnp.asarray(ground() > 1500)  # all but the water
    for i in range(ITERATIONS):
        value, gradients = gradient(directory / f"{i}")(velocity, still(), shots)
        changes, state = optimizer.update(gradients.params * unknown, state)
        moved: Any = optax.apply_updates(velocity, changes)
        velocity = jnp.clip(moved, 1400, 4500)
        misfits.append(float(value))
    return Result(np.asarray(velocity), misfits)


def kill_in_the_middle(directory: Path) -> None:
    """Start an inversion in a process of its own, and kill it while it computes a gradient."""
    numbers = [CELLS, SHOTS, STEPS_PER_SHOT, ITERATIONS, MEMORY, CHUNK_STEPS]
    with subprocess.Popen([sys.executable, __file__, str(directory), *map(str, numbers)]) as process:
        try:
            while not (directory / f"{round(KILLED_AT * ITERATIONS)}" / "plan.json").exists():
                assert process.poll() is None, "the inversion has ended before it could be killed"
                time.sleep(0.01)
        finally:
            process.kill()


class Budget(NamedTuple):
    """What a gradient takes with so many bytes on disk."""

    disk: int
    seconds: float
    evaluations: float  # of a chunk
    resident: float  # MiB of the process, beyond what it has when all is compiled


def budgets(directory: Path, shots: Step) -> list[Budget]:
    """One gradient with room for fewer and fewer states on disk."""
    velocity, few = jnp.asarray(first_guess()), Step(*(x[: 4 * CHUNK_STEPS] for x in shots))
    _, info = gradient(directory / "compiled", info=True)(velocity, still(), few)
    disk, found = info.state_bytes * (SHOTS * STEPS_PER_SHOT // CHUNK_STEPS - 1), []
    for part in (1, 4, 16, 64):
        run = gradient(directory / f"{part}", disk=disk // part, info=True)
        before, begun = resident(), time.perf_counter()
        _, info = run(velocity, still(), shots)
        found.append(Budget(disk // part, time.perf_counter() - begun, info.evaluations, resident() - before))
    return found


def full_size() -> list[Budget]:
    """Budgets of a survey whose states do not fit in 64 MiB."""
    global CELLS, SHOTS, STEPS_PER_SHOT, MEMORY, CHUNK_STEPS
    CELLS, SHOTS, STEPS_PER_SHOT, MEMORY, CHUNK_STEPS = 256, 50, 2000, 64 << 20, 500
    with tempfile.TemporaryDirectory() as path:
        return budgets(Path(path) / "budgets", survey(Path(path) / "survey"))


def resident() -> float:
    """The most MiB that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def draw(result: Result, costs: Sequence[Budget] = ()) -> Figure:
    """The ground, the first guess and what is found, the misfit, and time against disk where that was measured."""
    figure = Figure(figsize=(7, 4.6), layout="constrained", dpi=150)
    (above, below) = figure.subplots(2, 3)
    for axes in below[1:] if not costs else ():
        axes.remove()
    models = {"true velocity": ground(), "first guess": first_guess(), "found": result.velocity}
    size = CELLS * SPACING / 1000
    for axes, (title, model) in zip(above, models.items(), strict=True):
        axes.imshow(model, vmin=1500, vmax=2600, extent=(0, size, size, 0), cmap="viridis")
        axes.set(title=title, xlabel="km")
    above[0].set_ylabel("depth (km)")
    figure.colorbar(above[0].images[0], ax=list(above), label="m/s")
    below[0].plot(np.array(result.misfits) / result.misfits[0], marker=".", lw=1)
    below[0].set(title="misfit", xlabel="gradient", ylabel="part of the first", ylim=(0, None))
    bytes_ = [cost.disk / 2**20 for cost in costs]
    panels = (
        (below[1], [cost.seconds for cost in costs], "seconds of a gradient"),
        (below[2], [cost.evaluations for cost in costs], "evaluations of a chunk"),
    )
    for axes, values, title in panels if costs else ():
        axes.plot(bytes_, values, marker="o", lw=1)
        axes.set(title=title, xlabel="MiB on disk", xscale="log", ylim=(0, 1.1 * max(values)))
    return figure


def show(costs: list[Budget]) -> None:
    """As a table."""
    title = f"{SHOTS * STEPS_PER_SHOT} steps of {CELLS} x {CELLS} cells, {MEMORY >> 20} MiB of memory"
    table = Table("disk (MiB)", "evaluations of a chunk", "seconds", "memory (MiB)", title=title)
    for cost in costs:
        numbers = f"{cost.disk / 2**20:.1f}", f"{cost.evaluations:.2f}", f"{cost.seconds:.1f}", f"{cost.resident:.1f}"
        table.add_row(*numbers)
    Console().print(table)


def main() -> None:
    """Invert twice, once with a kill in the middle, and compare."""
    with tempfile.TemporaryDirectory() as path:
        root = Path(path)
        alone = invert(root / "alone")
        kill_in_the_middle(root / "killed")
        resumed = invert(root / "killed")
    same = np.array_equal(alone.velocity, resumed.velocity) and alone.misfits == resumed.misfits
    print(f"Killed and resumed, the model has the same bits: {same}")
    print(f"Misfit: {alone.misfits[0]:.3g}, after {ITERATIONS} gradients {alone.misfits[-1]:.3g}")
    draw(alone).savefig(FIGURE)
    print(f"Figure: {FIGURE.name}")
    assert same
    assert alone.misfits[-1] < 0.7 * alone.misfits[0]


if __name__ == "__main__":
    if sys.argv[1:] == ["full"]:
        show(full_size())
    elif len(sys.argv) > 1:
        if len(sys.argv) > 2:
            CELLS, SHOTS, STEPS_PER_SHOT, ITERATIONS, MEMORY, CHUNK_STEPS = map(int, sys.argv[2:])
        print("Misfits:", *(f"{value:.4g}" for value in invert(Path(sys.argv[1])).misfits))
    else:
        main()
