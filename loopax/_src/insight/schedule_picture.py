"""What the gradient of a loop keeps and replays, as an object to count, to print and to draw."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from loopax._src.extras import optional
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.static import Why, positive_int, static_bool, static_int
from loopax._src.schedule.binomial import Action
from loopax._src.schedule.machine import execute
from loopax._src.schedule.saving import SMALL_STORE_BYTES, Blocks, EveryStep, Saving, last_steps_of, saving_for

# A schedule over time: what is evaluated when, and what is stored from when to when.


class Evaluation(NamedTuple):
    """One evaluation of the body, or a derivative from stored residuals; it takes one unit of time."""

    kind: Literal["forward", "replay", "derivative"]
    step: int
    time: int


class Stored(NamedTuple):
    """A stored carry, or the stored residuals of a step."""

    kind: Literal["carry", "residuals"]
    step: int  # the carry before it, or its residuals
    start: int  # from this time
    end: int  # to this time


class Timeline(NamedTuple):
    """All of them, in the order in which they begin (evaluations) and end (what is stored)."""

    evaluations: list[Evaluation]
    stored: list[Stored]


def timeline(actions: Iterable[Action]) -> Timeline:
    """When each action of a schedule happens; the first time that a step is evaluated is the forward pass."""
    found, passed = Timeline([], []), 0
    kept, recorded = dict[int, int](), dict[int, int]()
    for action in actions:
        time = len(found.evaluations)
        match action.name:
            case "advance" | "record":
                is_first = action.step == passed
                found.evaluations.append(Evaluation("forward" if is_first else "replay", action.step, time))
                passed += is_first
                if action.name == "record":
                    recorded[action.step] = time + 1
            case "reverse":
                found.evaluations.append(Evaluation("derivative", action.step, time))
                if action.step in recorded:
                    found.stored.append(Stored("residuals", action.step, recorded.pop(action.step), time))
            case "keep":
                kept[action.step] = time
            case "drop":
                found.stored.append(Stored("carry", action.step, kept.pop(action.step), time))
    return found


# Draw a schedule: time goes right, steps go up.


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


# More is not drawn: in a terminal lines would wrap, and a figure has no room for the lines.
WIDEST, TALLEST = 120, 40
MOST_DRAWN = 200_000

_WHY = Why("what is drawn", "call it outside of `jit`, with the number of steps that the loop took (`info=True`)")


@dataclass(frozen=True)
class SchedulePicture:
    """The schedule of one gradient. `picture` makes it, `print` shows a text, and `.plot()` draws it.

    Attributes
    ----------
    num_steps : int
        The number of steps of the loop.
    saving : Blocks, Slots or None
        What the forward pass saves. `Blocks`: the carry at the start of every block. `Slots`: some carries. None: every
        carry.
    records : bool
        Whether recomputed steps store their residuals in place of carries.
    name : str
        The schedule in words.
    actions : tuple of Action
        All actions of the schedule, in order, computed at the first access.
    forward : int
        The evaluations of the body in the forward pass.
    replays : int
        The evaluations of steps that were evaluated before (recomputations).
    derivatives : int
        The evaluations for derivatives. A step whose residuals are stored needs none.
    evaluations : int
        All evaluations of the body.
    most_stored : int
        The most carries and residuals of steps that are stored at any time.
    room : int
        The carries (or residuals) for which the gradient allocates memory.

    """

    num_steps: int
    saving: Saving | None
    records: bool = False

    @property
    def _saving(self) -> Saving:
        return self.saving or EveryStep()

    @property
    def name(self) -> str:
        """The schedule in words."""
        return self._saving.describe(self.num_steps)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions of the schedule, in order."""
        return tuple(self._saving.actions(self.num_steps, self.records))

    @property
    def forward(self) -> int:
        """The evaluations of the body in the forward pass."""
        return self.num_steps

    @property
    def derivatives(self) -> int:
        """The evaluations for derivatives of steps whose residuals are not stored."""
        return self._saving.derivatives(self.num_steps, self.records)

    @property
    def replays(self) -> int:
        """The evaluations of steps that were evaluated before (recomputations)."""
        return self.evaluations - self.forward - self.derivatives

    @cached_property
    def evaluations(self) -> int:
        """All evaluations of the body, from formulas. There may be too many actions to list."""
        return self._saving.evaluations(self.num_steps, self.records)

    @cached_property
    def most_stored(self) -> int:
        """The most carries and residuals that are stored at any time, found by executing the actions."""
        return execute(self.actions, self.num_steps).most_stored

    @property
    def room(self) -> int:
        """The carries (or residuals) for which the gradient allocates memory.

        With blocks: the carry at each start, and the carries of one block.
        """
        return self._saving.room(self.num_steps)

    def __str__(self) -> str:
        """Return the counts as a text, with a diagram if it fits into a terminal."""
        parts = f"{self.forward} forward, {self.replays} again, {self.derivatives} for derivatives"
        times = f" ({self.evaluations / self.num_steps:.3g} for each step)" if self.num_steps else ""
        room = _count(self.room, "carry", "carries") + (" or sets of residuals" if self.records else "")
        counts = [
            f"{_count(self.num_steps, 'step')}; {self.name}",
            f"{_count(self.evaluations, 'evaluation')} of the body{times}: {parts}",
            f"room for {room}",
        ]
        if self.num_steps > TALLEST or self.evaluations > WIDEST:
            counts[-1] += "; too large for a diagram of text"
            counts[-1] += ", `.plot()` draws it" if self.evaluations <= MOST_DRAWN else ""
        elif self.num_steps:
            counts[-1] += f", at most {self.most_stored} in use"
            counts.insert(0, as_text(timeline(self.actions), self.num_steps))
        return "\n".join(counts)

    def plot(self, axes: Any = None) -> Any:
        """Draw the schedule, and return the axes (needs matplotlib). Time goes right, steps go up.

        Dark blue: the forward pass. Light blue: recomputed steps. Red: derivatives. A grey bar is a carry, from when it
        is stored to when it is dropped. A yellow bar is the residuals of a step.

        Raises
        ------
        ValueError
            There are more than 200 000 evaluations to draw.
        ImportError
            matplotlib is not installed.

        """
        if self.evaluations > MOST_DRAWN:
            raise ValueError(
                f"this schedule has {self.evaluations} evaluations, and at most {MOST_DRAWN} are drawn. Draw fewer "
                "steps; the counts of these are in `.evaluations`, `.replays` and `.room`."
            )
        axes = plot(timeline(self.actions), self.num_steps, axes)
        axes.set_title(f"{self.name}: {_count(self.evaluations, 'evaluation')}", fontsize="medium")
        return axes


@api_boundary
def picture(
    num_steps: int, checkpoints: int | None = None, *, length_known: bool = True, residuals: bool = False
) -> SchedulePicture:
    """Show which carries a gradient with `Checkpointed(checkpoints)` stores, and which steps it recomputes.

    ::

        print(schedule.picture(10, 3))  # a diagram of text, and the counts
        schedule.picture(100, 10).plot()  # a figure

    Parameters
    ----------
    num_steps
        The number of steps that the loop takes, from 0 on.
    checkpoints
        The most stored carries, as in `Checkpointed(checkpoints)`. None: as in `Checkpointed()`.
    length_known
        Whether the number of steps is fixed when the loop is traced. False: it is found while the loop runs, without a
        bound (`while_loop`, `scan` with `stop`).
    residuals
        Whether the residuals of a step take no more room than a carry. True: recomputed steps store their residuals.
        `explain` shows whether a loop does so.

    Returns
    -------
    SchedulePicture
        The schedule, with counts as fields, a diagram as text, and `.plot()`.

    Raises
    ------
    TypeError
        - `num_steps` or `checkpoints` is not an int.
        - `length_known` or `residuals` is not a bool.
        - One of them is traced.
    ValueError
        `num_steps` is negative, or `checkpoints` is less than 1.

    Notes
    -----
    Nothing is compiled or run. Loops use the same function to choose their schedule.

    The picture assumes a carry of more than 8 KiB. Smaller carries may have shorter blocks.

    A loop whose length is known only when it starts (a traced length) always has the binomial schedule, also where
    `checkpoints` is enough for two levels. At 1000 steps, two levels need at most 2 % more evaluations than the
    binomial schedule with up to 303 checkpoints, and 25 % more with 999.

    """
    steps = _num_steps(num_steps)
    if checkpoints is not None:
        checkpoints = positive_int("picture(checkpoints=...)", checkpoints, "stored carries", _WHY)
    length_known = static_bool("picture(length_known=...)", length_known, _WHY)
    bound = steps if length_known else None
    saving = saving_for(
        checkpoints, bound, SMALL_STORE_BYTES + 1, length_known=length_known, always_to_bound=length_known
    )
    residuals = static_bool("picture(residuals=...)", residuals, _WHY)
    if residuals and bound and checkpoints and (last := last_steps_of(bound, checkpoints, 1, 1)):
        saving = Blocks(last.block, recorded=last.recorded)
    return SchedulePicture(steps, saving, records=residuals and saving is not None)


def _num_steps(value: Any) -> int:
    steps = static_int("picture(num_steps=...)", value, _WHY)
    if steps < 0:
        raise ValueError(f"picture(num_steps=...): got {steps}, expected at least 0, the steps that the loop takes.")
    return steps


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
