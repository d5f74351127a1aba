"""Draw the pictures of the pages, all of them or those that are named.

They are drawn from loopax itself, from results that are committed, and by running the
examples: `PYTHONPATH=. python docs/pictures.py planets lanes`.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

import loopax as lx
from benchmarks.short import beside_peers
from benchmarks.short.measure import Measurement
from docs import diagrams, figures, idea_diagram, schedule_figure
from loopax import schedule
from tests.support.example_files import load_example

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"
# The run that benchmark.md shows: `python -m benchmarks --short --json` has written it.
COMMAND = HERE.parent / "benchmarks" / "command_bench.json"
STEPS, SLOTS = 30, 5


def schedules() -> Figure:
    """Three schedules of checkpoints."""
    pictures = [
        schedule.picture(STEPS),
        schedule.picture(STEPS, SLOTS),
        schedule.picture(STEPS, SLOTS, length_known=False),
    ]
    figure, rows = plt.subplots(len(pictures), figsize=(5, 8.4), layout="constrained")
    for axes, picture in zip(rows, pictures, strict=True):
        schedule_figure.draw(picture, axes)
        axes.set_xlim(0, max(picture.evaluations for picture in pictures))
    with_one_legend(figure)
    return figure


def lanes() -> Figure:
    """The occupancy of a batch whose lanes take log-normal numbers of steps: mean 65, sigma 1.2."""
    counts = np.random.RandomState(0).lognormal(np.log(65) - 1.2**2 / 2, 1.2, 1024)
    report = lx.lane_report(np.clip(counts, 1, 1000).astype(int))
    ways = {
        "Lockstep()": report.lockstep,
        "Compact(), in groups": report.groups,
        "Compact(), in stages": report.stages,
    }
    figure, rows = plt.subplots(len(ways), figsize=(5, 6), layout="constrained")
    for axes, (title, stretches) in zip(rows, ways.items(), strict=True):
        report.plot(stretches, axes)
        axes.set_title(f"{title}: {report.share(stretches):.0%} useful")
    with_one_legend(figure)
    return figure


def with_one_legend(figure: Figure) -> None:
    """Put the same legend of all panels below them."""
    entries = figure.axes[0].get_legend_handles_labels()
    for axes in figure.axes:
        if legend := axes.get_legend():
            legend.remove()
        axes.set_xlabel(axes.get_xlabel() if axes is figure.axes[-1] else "")
    figure.legend(*entries, loc="outside lower center", ncols=2)


def comparison() -> Figure:
    """Kinds on the gradient of a small network that a solver goes through: time against memory."""

    def loss(weights: jax.Array, y: jax.Array) -> jax.Array:
        def step(_: jax.Array, y: jax.Array) -> jax.Array:
            return y + 0.01 * jnp.tanh(jnp.tanh(y @ weights) @ weights)

        return (lx.fori_loop(0, 2000, step, y) ** 2).mean()

    kinds = [lx.Checkpointed(10), lx.Checkpointed(), lx.Bounded(), lx.Residuals()]
    weights, y = 0.1 * jnp.ones((32, 32)), jnp.ones((16, 32))
    compared = lx.compare(loss, weights, y, kinds=kinds)
    figure, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
    compared.plot(axes)
    return figure


def command() -> Figure:
    """What `python -m benchmarks --short` has measured."""
    measured = json.loads(COMMAND.read_text())["measured"]
    return beside_peers.draw([Measurement(**row) for row in measured])


def of_example(name: str) -> None:
    """Run an example, which draws its figure, and trains for half a minute."""
    example, path = load_example(name), PICTURES / f"{name}.svg"
    vars(example).update(FIGURE=path)
    example.main()
    figures.give_scheme(path)
    jax.config.update("jax_enable_x64", False)  # an example may have set it


def waveform_inversion() -> Figure:
    """An inversion of a small survey, and what a gradient of a large one takes with less and less disk."""
    example = load_example("waveform_inversion")
    with tempfile.TemporaryDirectory() as path:
        result = example.invert(Path(path))
    costs = example.full_size()
    example.show(costs)
    example.CELLS = 96  # of the inversion
    return example.draw(result, costs)


DRAWN: dict[str, Callable[[], Figure]] = {
    "schedules": schedules,
    "lanes": lanes,
    "compare": comparison,
    "waveform_inversion": waveform_inversion,
    "command_bench": command,
}
WRITTEN: dict[str, Callable[[], str]] = {
    "idea": idea_diagram.idea,
    "loop": diagrams.loop,
    "inactive-lanes": diagrams.inactive_lanes,
}
EXAMPLES = (
    "adaptive_ode",
    "multistep_integrator",
    "reinforcement_learning",
    "normalising_flow",
    "durable_training",
    "hessian_trace",
    "planets",
    "truncated_backpropagation",
    "deep_equilibrium",
    "mixture_of_experts",
    "text_generation",
    "nuts",
    "spike_times",
    "bouncing_balls",
    "constrained_least_squares",
)


def draw(name: str) -> None:
    """Write the picture of this name."""
    if name in WRITTEN:
        (PICTURES / f"{name}.svg").write_text(WRITTEN[name]())
        return
    with mpl.rc_context(figures.STYLE):
        if name in DRAWN:
            figures.save(DRAWN[name](), PICTURES / f"{name}.svg")
        else:
            of_example(name)


def main() -> None:
    """Draw what is asked for."""
    for name in sys.argv[1:] or (*DRAWN, *WRITTEN, *EXAMPLES):
        draw(name)


if __name__ == "__main__":
    main()
