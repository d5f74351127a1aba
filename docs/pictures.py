"""Draw the pictures of schedules for docs/kinds.md, from the schedules themselves."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from loopax import schedule
from loopax.schedule import Action

HERE = Path(__file__).parent
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
                axes.plot([time, time + 1], [action.step, action.step + 1], color="tab:blue", linewidth=1.5)
            case "reverse":
                axes.plot([time, time + 1], [action.step + 1, action.step], color="tab:red", linewidth=1.5)
            case "keep":
                kept[action.step] = time
            case "drop":
                axes.plot([kept.pop(action.step), time], [action.step] * 2, color="tab:gray", linewidth=0.8, zorder=0)
        if action.name in ("advance", "reverse"):
            time, evaluations = time + 1, evaluations + 1
    axes.set_title(f"{title}: {evaluations} evaluations", fontsize=10)
    axes.set_ylabel("step")
    axes.set_ylim(0, STEPS)


def main() -> None:
    """Write the figure."""
    mpl.rcParams.update({"svg.hashsalt": "loopax", "svg.fonttype": "none"})
    programs = {
        "two levels, 6 blocks of 5, at most 11 carries": schedule.two_level(STEPS, 5),
        f"binomial, known length, at most {SLOTS} carries": schedule.binomial(STEPS, SLOTS),
        f"online, unknown length, at most {SLOTS} carries": online(STEPS, SLOTS),
    }
    figure, rows = plt.subplots(len(programs), 1, figsize=(8, 8), sharex=True, layout="constrained")
    for axes, (title, actions) in zip(rows, programs.items(), strict=True):
        draw(axes, actions, title)
    rows[-1].set_xlabel("evaluations of the body")
    figure.savefig(HERE / "pictures" / "schedules.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
