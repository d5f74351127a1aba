"""Draw a schedule of checkpoints: time goes right, steps go up."""

from collections import defaultdict
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from loopax.schedule import Action, SchedulePicture

Line = list[tuple[float, float]]  # two points, each a time and a step

# Their colours and labels, in the order in which they are drawn. Bars are what is stored.
BARS = {
    "carry": ("darkgray", "carry stored"),
    "residuals": ("C1", "residuals stored"),
}
EVALUATIONS = {
    "forward": ("C0", "forward"),
    "replay": ("C9", "evaluated again"),
    "derivative": ("C3", "derivative"),
}


def lines(actions: Iterable[Action]) -> dict[str, list[Line]]:
    """What is drawn. An evaluation, or a derivative from residuals, takes one unit of time."""
    found, kept, recorded = defaultdict[str, list[Line]](list), {}, {}
    time = passed = 0
    for name, step in actions:
        if name == "keep":
            kept[step] = time
        elif name == "drop":
            found["carry"].append([(kept.pop(step), step), (time, step)])
        elif name == "reverse":
            if step in recorded:
                found["residuals"].append([(recorded.pop(step), step), (time, step)])
            found["derivative"].append([(time, step + 1), (time + 1, step)])
        elif name in ("advance", "record"):
            kind = "forward" if step == passed else "replay"
            found[kind].append([(time, step), (time + 1, step + 1)])
            passed = max(passed, step + 1)
            if name == "record":
                recorded[step] = time + 1
        time += name in ("advance", "record", "reverse")
    return found


def draw(picture: SchedulePicture, axes: Axes) -> None:
    """Draw it into these axes, so that bars of stored carries do not touch each other."""
    drawn = lines(picture.actions)
    inches = axes.get_window_extent().height / axes.figure.dpi
    height = min(72 * inches / (picture.num_steps + 1), 10.0)  # of a step, in points
    for kind, (colour, label) in (BARS | EVALUATIONS).items():
        width = max(0.55 * height, 0.6) if kind in BARS else min(max(height, 1.0), 1.8)
        if drawn[kind] or kind != "residuals":
            axes.add_collection(
                LineCollection(
                    drawn[kind], colors=colour, linewidths=width, label=label
                )
            )
    time = sum(len(drawn[kind]) for kind in EVALUATIONS)
    axes.set(xlim=(0, max(time, 1)), ylim=(-0.5, picture.num_steps + 0.5))
    unit = "evaluations of the body"
    axes.set(
        xlabel=f"{unit}, derivatives included" if drawn["residuals"] else unit,
        ylabel="step",
    )
    axes.legend(loc="upper right", ncols=2, fontsize="small", framealpha=0.9)
    evaluations = f"{picture.evaluations} evaluations"
    axes.set_title(f"{picture.name}: {evaluations}", fontsize="medium")
