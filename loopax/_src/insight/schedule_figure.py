"""Draw a schedule: time goes right, steps go up."""

from typing import Any

from loopax._src.extras import optional
from loopax._src.insight.schedule_timeline import Timeline

SIGNS = {"forward": "/", "replay": "+", "derivative": "\\"}
BARS = {"carry": "-", "residuals": "="}
COLOURS = {
    "forward": "C0",
    "replay": "C9",
    "derivative": "C3",
    "carry": "darkgray",
    "residuals": "C1",
}
LABELS = {
    "forward": "forward",
    "replay": "evaluated again",
    "derivative": "derivative",
    "carry": "carry stored",
    "residuals": "residuals stored",
}


def as_text(found: Timeline, num_steps: int) -> str:
    """One character for each evaluation, a line for each step."""
    rows = [[" "] * len(found.evaluations) for _ in range(num_steps)]
    for what, step, start, end in found.stored:
        rows[step][start:end] = BARS[what] * (end - start)
    for kind, step, time in found.evaluations:
        rows[step][time] = SIGNS[kind]
    width = len(str(num_steps - 1))
    lines = [f"{step:>{width}} |{''.join(rows[step]).rstrip()}" for step in reversed(range(num_steps))]
    legend = f"{'':{width}}  / forward   + evaluated again   \\ derivative   - the carry before this step is stored"
    records = _has_residuals(found)
    return "\n".join([*lines, legend, *([f"{'':{width}}  = the residuals of this step are stored"] if records else [])])


def plot(found: Timeline, num_steps: int, axes: Any) -> Any:
    """Draw the timeline with matplotlib, into given axes or new ones."""
    if axes is None:
        axes = optional("matplotlib.pyplot", "matplotlib", "A picture of a schedule").subplots(layout="constrained")[1]
    line_collection = optional("matplotlib.collections", "matplotlib", "A picture of a schedule").LineCollection
    height = _points_per_step(axes, num_steps)
    for what in BARS:
        bars = [[(start, step), (end, step)] for kind, step, start, end in found.stored if kind == what]
        if bars or what == "carry":
            width = max(0.55 * height, 0.6)
            axes.add_collection(line_collection(bars, colors=COLOURS[what], linewidths=width, label=LABELS[what]))
    for kind in SIGNS:
        down = kind == "derivative"
        lines = [
            [(time, step + down), (time + 1, step + 1 - down)] for name, step, time in found.evaluations if name == kind
        ]
        width = min(max(height, 1.0), 1.8)
        axes.add_collection(line_collection(lines, colors=COLOURS[kind], linewidths=width, label=LABELS[kind]))
    axes.set(xlim=(0, max(len(found.evaluations), 1)), ylim=(-0.5, num_steps + 0.5))
    records = _has_residuals(found)
    axes.set(xlabel="evaluations of the body" + (", derivatives included" if records else ""), ylabel="step")
    axes.legend(loc="upper right", ncols=2, fontsize="small", framealpha=0.9)
    return axes


def _has_residuals(found: Timeline) -> bool:
    return any(what == "residuals" for what, *_ in found.stored)


def _points_per_step(axes: Any, num_steps: int) -> float:
    """How high a step is drawn, so that bars of stored carries do not touch each other."""
    inches = axes.get_window_extent().height / axes.figure.dpi
    return min(72 * inches / (num_steps + 1), 10.0)
