"""Draw the pictures of the pages, from loopax itself and by running the examples."""

import runpy
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import loopax as lx
from loopax import schedule

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
STEPS, SLOTS = 30, 5


def draw_schedules() -> None:
    """Three schedules of checkpoints."""
    pictures = [
        schedule.picture(STEPS),
        schedule.picture(STEPS, SLOTS),
        schedule.picture(STEPS, SLOTS, length_known=False),
    ]
    figure, rows = plt.subplots(len(pictures), 1, figsize=(8, 9), layout="constrained")
    for axes, picture in zip(rows, pictures, strict=True):
        picture.plot(axes).set_xlim(0, max(picture.evaluations for picture in pictures))
    figure.savefig(HERE / "pictures" / "schedules.svg", metadata={"Date": None})


def draw_lanes() -> None:
    """The occupancy of a batch whose lanes take log-normal numbers of steps: mean 65, sigma 1.2."""
    counts = np.random.RandomState(0).lognormal(np.log(65) - 1.2**2 / 2, 1.2, 1024)
    report = lx.lane_report(np.clip(counts, 1, 1000).astype(int))
    ways = {
        "Lockstep()": report.lockstep,
        "Compact(), in groups": report.groups,
        "Compact(), in stages": report.stages,
    }
    figure, rows = plt.subplots(len(ways), 1, figsize=(8, 7), layout="constrained")
    for axes, (title, stretches) in zip(rows, ways.items(), strict=True):
        report.plot(stretches, axes)
        axes.set_title(f"{title}: {axes.get_title()}", fontsize=10)
    figure.savefig(HERE / "pictures" / "lanes.png", dpi=110)


def draw_comparison() -> None:
    """Kinds on the gradient of a small network that a solver goes through: time against memory."""

    def loss(weights: jax.Array, y: jax.Array) -> jax.Array:
        def step(_: jax.Array, y: jax.Array) -> jax.Array:
            return y + 0.01 * jnp.tanh(jnp.tanh(y @ weights) @ weights)

        return (lx.fori_loop(0, 2000, step, y) ** 2).mean()

    kinds = [lx.Checkpointed(10), lx.Checkpointed(), lx.Bounded(), lx.Residuals()]
    weights, y = 0.1 * jnp.ones((32, 32)), jnp.ones((16, 32))
    compared = lx.compare(loss, weights, y, kinds=kinds)
    axes = plt.subplots(figsize=(7, 4.2), layout="constrained")[1]
    compared.plot(axes).figure.savefig(HERE / "pictures" / "compare.png", dpi=110)


def draw_solver() -> None:
    """The solutions, steps and gradients of the example."""
    example = runpy.run_path(str(EXAMPLES / "adaptive_ode.py"))
    example["draw"](example["results"]()).savefig(
        HERE / "pictures" / "adaptive-ode.png"
    )


def draw_trained(name: str) -> None:
    """The figure of an example that trains for half a minute."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shutil.copy(EXAMPLES / f"{name}.png", HERE / "pictures")


def main() -> None:
    """Write the figures."""
    mpl.rcParams.update({"svg.hashsalt": "loopax", "svg.fonttype": "none"})
    draw_schedules()
    draw_lanes()
    draw_comparison()
    draw_solver()
    for name in (
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
    ):
        draw_trained(name)


if __name__ == "__main__":
    main()
