"""Draw the pictures of the pages, from loopax itself and by running the examples."""

import runpy
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

import loopax as lx
from loopax import schedule
from loopax.schedule import Action

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
STEPS, SLOTS = 30, 5


def online(num_steps: int, slots: int) -> Iterator[Action]:
    """The whole online schedule."""
    history = list(islice(schedule.online(slots), num_steps))
    yield from schedule.forward(history)
    yield from schedule.replay(history[-1], num_steps, slots)


def draw(axes: Axes, actions: Iterable[Action], title: str) -> None:
    """Time goes right, steps go up: what is evaluated, and for how long carries are stored."""
    time, kept, evaluations = 0, {}, 0
    for action in actions:
        match action.name:
            case "advance":
                axes.plot(
                    [time, time + 1],
                    [action.step, action.step + 1],
                    color="tab:blue",
                    linewidth=1.5,
                )
            case "reverse":
                axes.plot(
                    [time, time + 1],
                    [action.step + 1, action.step],
                    color="tab:red",
                    linewidth=1.5,
                )
            case "keep":
                kept[action.step] = time
            case "drop":
                axes.plot(
                    [kept.pop(action.step), time],
                    [action.step] * 2,
                    color="tab:gray",
                    linewidth=0.8,
                    zorder=0,
                )
        if action.name in ("advance", "reverse"):
            time, evaluations = time + 1, evaluations + 1
    axes.set_title(f"{title}: {evaluations} evaluations", fontsize=10)
    axes.set_ylabel("step")
    axes.set_ylim(0, STEPS)


def draw_schedules() -> None:
    """Three schedules of checkpoints."""
    programs = {
        "two levels, 6 blocks of 5, at most 11 carries": schedule.two_level(STEPS, 5),
        f"binomial, known length, at most {SLOTS} carries": schedule.binomial(
            STEPS, SLOTS
        ),
        f"online, unknown length, at most {SLOTS} carries": online(STEPS, SLOTS),
    }
    figure, rows = plt.subplots(
        len(programs), 1, figsize=(8, 8), sharex=True, layout="constrained"
    )
    for axes, (title, actions) in zip(rows, programs.items(), strict=True):
        draw(axes, actions, title)
    rows[-1].set_xlabel("evaluations of the body")
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
    draw_solver()
    for name in (
        "multistep_integrator",
        "reinforcement_learning",
        "normalising_flow",
        "durable_training",
        "hessian_trace",
    ):
        draw_trained(name)


if __name__ == "__main__":
    main()
