"""What the gradient of a loop keeps and replays, as an object to count, to print and to draw."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from loopax._src.insight.schedule_figure import as_text, plot
from loopax._src.insight.schedule_timeline import timeline
from loopax._src.pytrees.static_args import Why, positive_int, static_bool, static_int
from loopax._src.schedule.actions import Action
from loopax._src.schedule.blocks import SMALL_STORE_BYTES
from loopax._src.schedule.machine import execute
from loopax._src.schedule.saving import Blocks, EveryStep, Saving, last_steps_of, saving_for

# More is not drawn: in a terminal lines would wrap, and a figure has no room for the lines.
WIDEST, TALLEST = 120, 40
MOST_DRAWN = 200_000

_WHY = Why("what is drawn", "call it outside of `jit`, with the number of steps that the loop took (`info=True`)")


@dataclass(frozen=True)
class SchedulePicture:
    """The schedule of one gradient: made by `picture`, printed as text, drawn by `.plot()`.

    Attributes
    ----------
    num_steps : int
        Of the loop.
    saving : Blocks, Slots or None
        What is saved: the carry at the start of every block, some carries in slots, or (None) every carry.
    records : bool
        Where steps are evaluated again, their residuals are stored in the place of carries.
    name : str
        The schedule in words.
    actions : tuple of Action
        All of it, in order; made when it is first asked for.
    forward, replays, derivatives, evaluations : int
        Evaluations of the body in the forward pass, again, for derivatives, and all of them. The derivative of a step
        whose residuals are stored evaluates nothing.
    most_stored : int
        The most carries and residuals of steps that are stored at any time.
    room : int
        The carries (or residuals) for which the gradient sets memory aside.

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
        """All of the schedule."""
        return tuple(self._saving.actions(self.num_steps, self.records))

    @property
    def forward(self) -> int:
        """Evaluations of the forward pass."""
        return self.num_steps

    @property
    def derivatives(self) -> int:
        """Evaluations for derivatives of steps whose residuals are not stored."""
        return self._saving.derivatives(self.num_steps, self.records)

    @property
    def replays(self) -> int:
        """Evaluations of steps that were evaluated before."""
        return self.evaluations - self.forward - self.derivatives

    @cached_property
    def evaluations(self) -> int:
        """All evaluations of the body, from formulas: also where there are too many actions to list."""
        return self._saving.evaluations(self.num_steps, self.records)

    @cached_property
    def most_stored(self) -> int:
        """The most carries that are stored at any time: the actions are carried out, and checked."""
        return execute(self.actions, self.num_steps).most_stored

    @property
    def room(self) -> int:
        """The carries for which the gradient sets memory aside: for blocks, one of all starts and one of a block."""
        return self._saving.room(self.num_steps)

    def __str__(self) -> str:
        """The counts, after a diagram where it fits into a terminal."""
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
        """Draw the schedule: time goes right, steps go up; returns the axes (needs matplotlib).

        Dark blue: the forward pass. Light blue: steps that are evaluated again. Red: their derivatives. A grey bar is a
        carry, from when it is stored to when it is dropped; a yellow one is the residuals of a step.

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


def picture(
    num_steps: int, checkpoints: int | None = None, *, length_known: bool = True, residuals: bool = False
) -> SchedulePicture:
    """Show what the gradient of a loop of kind `Checkpointed(checkpoints)` keeps, and what it evaluates again.

    ::

        print(schedule.picture(10, 3))  # a diagram of text, and the counts
        schedule.picture(100, 10).plot()  # a figure

    Parameters
    ----------
    num_steps
        The steps that the loop takes, from 0 on.
    checkpoints
        As in `Checkpointed(checkpoints)`, the number of stored carries, or None for its default.
    length_known
        True: the number of steps is fixed when the loop is traced. False: it is found while the loop runs, without a
        bound (`while_loop`, `scan` with `stop`).
    residuals
        True: the residuals of a step take no more room than a carry, so a loop stores those where it evaluates steps
        again. `explain` says whether a loop does.

    Returns
    -------
    SchedulePicture
        Counts as fields, a diagram as text, and `.plot()`.

    Raises
    ------
    TypeError
        `num_steps` or `checkpoints` is not an int, `length_known` or `residuals` is no bool, or one of them is traced.
    ValueError
        `num_steps` is negative, or `checkpoints` less than 1.

    Notes
    -----
    Nothing is compiled or run. Loops make the same decision by the same function. A carry is taken to be larger than
    8 KiB, as smaller ones may get shorter blocks. A loop whose length is known only when it starts (a traced length)
    has the binomial schedule also where `checkpoints` would be enough for two levels, which takes up to 2 % fewer
    evaluations at 1000 steps.

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
