"""What the gradient of a loop keeps and replays, as an object to count and to print."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from loopax._src.core.ir.plan import (
    Blocks,
    BlocksThenResiduals,
    Checkpoints,
    EveryCarry,
    Plan,
    Slots,
    WalkBack,
)
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.static import Why, positive_int, static_bool, static_int
from loopax._src.schedule.binomial import Action, binomial, evaluations, evaluations_from, forward, replay
from loopax._src.schedule.blocks import SMALL_STORE_BYTES, last_steps, two_level
from loopax._src.schedule.online import online, online_stored

# More is not printed: in a terminal lines would wrap.
WIDEST, TALLEST = 120, 40

# What plans mean for a loop of so many steps. A plan that is none of these stores the carry before every step.


def actions_of(plan: Plan | None, num_steps: int, records: bool) -> Iterator[Action]:
    """The whole schedule; where it `records`, replays store residuals in the place of carries."""
    match plan:
        case Blocks():
            yield from two_level(num_steps, plan.size, records)
        case BlocksThenResiduals():
            yield from two_level(num_steps, plan.blocks.size, records, plan.recorded)
        case Slots(length_known=True):
            yield from binomial(num_steps, plan.count, records)
        case Slots():
            history = list(islice(online(plan.count), num_steps))
            yield from forward(history)
            yield from replay(history[-1] if history else (), num_steps, plan.count, records)
        case _:
            yield from two_level(num_steps, 1)


def evaluations_of(plan: Plan | None, num_steps: int, records: bool) -> int:
    """How often forward and gradient evaluate the body, from a formula: twice each step, if none is replayed."""
    match plan:
        case Blocks():
            return 2 * num_steps if records else 3 * num_steps - plan.rows(num_steps)
        case BlocksThenResiduals():
            return 2 * num_steps - plan.recorded
        case Slots(length_known=True):
            return evaluations(num_steps, plan.count, records)
        case Slots():  # followed step by step
            return evaluations_from(online_stored(num_steps, plan.count), num_steps, plan.count, records)
    return 2 * num_steps


def room_of(plan: Plan | None, num_steps: int, carry: int = 1) -> int:
    """The memory that a gradient of so many steps sets aside: in bytes for the bytes of a carry, else in carries."""
    match plan:
        case Blocks():  # replays of a block may store residuals that are larger than a carry
            return plan.rows(num_steps) * carry + plan.size * max(carry, plan.record_bytes)
        case BlocksThenResiduals(blocks=blocks, recorded=recorded):
            replays, residuals = blocks.size * max(carry, blocks.record_bytes), recorded * blocks.record_bytes
            return blocks.rows(num_steps - recorded) * carry + max(replays, residuals)
        case Slots():
            return plan.count * carry
        case WalkBack():
            return carry
    return num_steps * carry


def counted(number: int, one: str, several: str = "") -> str:
    """A number and a noun."""
    return f"{number} {one if number == 1 else several or one + 's'}"


_WHY = Why("what is drawn", "call it outside of `jit`, with the number of steps that the loop took (`info=True`)")


@dataclass(frozen=True)
class SchedulePicture:
    """The schedule of one gradient. `picture` makes it, and `print` shows it.

    Attributes
    ----------
    num_steps : int
        The number of steps of the loop.
    records : bool
        Whether recomputed steps store their residuals in place of carries.

    """

    num_steps: int
    _plan: Plan = field(repr=False)
    records: bool = False

    @property
    def name(self) -> str:
        """The schedule in words."""
        plan, replayed, then = self._plan, self.num_steps, ""
        if isinstance(plan, BlocksThenResiduals):
            then, replayed = f", then {plan.recorded} steps with residuals", replayed - plan.recorded
            plan = plan.blocks
            if not replayed:
                return "residuals of every step"
        if isinstance(plan, Blocks):
            return f"two levels, {counted(plan.rows(replayed), 'block')} of {plan.size} steps{then}"
        if isinstance(plan, Slots):
            schedule = "binomial, known length" if plan.length_known else "online, unknown length"
            return f"{schedule}, at most {counted(plan.count, 'carry', 'carries')}"
        return "every carry"

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions of the schedule, in order, computed at the first access."""
        return tuple(actions_of(self._plan, self.num_steps, self.records))

    @property
    def forward(self) -> int:
        """The evaluations of the body in the forward pass."""
        return self.num_steps

    @property
    def derivatives(self) -> int:
        """The evaluations for derivatives. A step whose residuals are stored needs none."""
        if not self.records:
            return self.num_steps
        if not isinstance(self._plan, Slots):
            return 0
        return self.num_steps - evaluations_of(self._plan, self.num_steps, False) + self.evaluations

    @property
    def replays(self) -> int:
        """The evaluations of steps that were evaluated before (recomputations)."""
        return self.evaluations - self.forward - self.derivatives

    @cached_property
    def evaluations(self) -> int:
        """All evaluations of the body, from formulas. There may be too many actions to list."""
        return evaluations_of(self._plan, self.num_steps, self.records)

    @cached_property
    def most_stored(self) -> int:
        """The most carries and residuals of steps that are stored at any time, found from the actions."""
        recorded = {step for name, step in self.actions if name == "record"}
        stored = most = 0
        for name, step in self.actions:
            stored += name in ("keep", "record")
            stored -= name == "drop" or (name == "reverse" and step in recorded)
            most = max(most, stored)
        return most

    @property
    def room(self) -> int:
        """The carries (or residuals) for which the gradient allocates memory.

        With blocks: the carry at each start, and the carries of one block.
        """
        return room_of(self._plan, self.num_steps)

    def __str__(self) -> str:
        """Return the counts as a text, with a diagram if it fits into a terminal."""
        parts = f"{self.forward} forward, {self.replays} again, {self.derivatives} for derivatives"
        times = f" ({self.evaluations / self.num_steps:.3g} for each step)" if self.num_steps else ""
        room = counted(self.room, "carry", "carries") + (" or sets of residuals" if self.records else "")
        counts = [
            f"{counted(self.num_steps, 'step')}; {self.name}",
            f"{counted(self.evaluations, 'evaluation')} of the body{times}: {parts}",
            f"room for {room}",
        ]
        if self.num_steps > TALLEST or self.evaluations > WIDEST:
            counts[-1] += "; too large for a diagram of text"
        elif self.num_steps:
            counts[-1] += f", at most {self.most_stored} in use"
            counts.insert(0, self._diagram())
        return "\n".join(counts)

    def _diagram(self) -> str:
        """One character for each evaluation and each derivative, a line for each step."""
        signs = {"advance": "+", "record": "+", "reverse": "\\"}
        rows = [[" "] * sum(name in signs for name, _ in self.actions) for _ in range(self.num_steps)]
        begun: dict[tuple[str, int], int] = {}  # since when a carry or residuals of a step are stored
        time = passed = 0
        for name, step in self.actions:
            bar = "=" if name == "reverse" else "-"
            if name in ("drop", "reverse") and (bar, step) in begun:
                since = begun.pop((bar, step))
                rows[step][since:time] = [bar if sign == " " else sign for sign in rows[step][since:time]]
            if name == "keep":
                begun["-", step] = time
            if name in signs:
                is_forward = step == passed and name != "reverse"  # the first time that the step is evaluated
                rows[step][time] = "/" if is_forward else signs[name]
                time, passed = time + 1, passed + is_forward
            if name == "record":
                begun["=", step] = time
        width = len(str(self.num_steps - 1))
        lines = [f"{step:>{width}} |{''.join(rows[step]).rstrip()}" for step in reversed(range(self.num_steps))]
        legend = "/ forward   + evaluated again   \\ derivative   - the carry before this step is stored"
        lines.append(f"{'':{width}}  {legend}")
        if any(name == "record" for name, _ in self.actions):
            lines.append(f"{'':{width}}  = the residuals of this step are stored")
        return "\n".join(lines)


@api_boundary
def picture(
    length: int, checkpoints: int | None = None, *, length_known: bool = True, residuals: bool = False
) -> SchedulePicture:
    """Show which carries a gradient with `Checkpointed(checkpoints)` stores, and which steps it recomputes.

    ::

        print(schedule.picture(10, 3))  # a diagram of text, and the counts

    Parameters
    ----------
    length
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
        The schedule, with counts as fields, and a diagram as text.

    Raises
    ------
    TypeError
        - `length` or `checkpoints` is not an int.
        - `length_known` or `residuals` is not a bool.
        - One of them is traced.
    ValueError
        `length` is negative, or `checkpoints` is less than 1.

    Notes
    -----
    Nothing is compiled or run. Loops use the same function to choose their schedule.

    The picture assumes a carry of more than 8 KiB. Smaller carries may have shorter blocks.

    A loop whose length is known only when it starts (a traced length) always has the binomial schedule, also where
    `checkpoints` is enough for two levels. At 1000 steps, two levels need at most 2 % more evaluations than the
    binomial schedule with up to 303 checkpoints, and 25 % more with 999.

    """
    steps = static_int("picture(length=...)", length, _WHY)
    if steps < 0:
        raise ValueError(f"picture(length=...): got {steps}, expected at least 0, the steps that the loop takes.")
    if checkpoints is not None:
        checkpoints = positive_int("picture(checkpoints=...)", checkpoints, "stored carries", _WHY)
    length_known = static_bool("picture(length_known=...)", length_known, _WHY)
    residuals = static_bool("picture(residuals=...)", residuals, _WHY)
    bound = steps if length_known else None
    asked = Checkpoints(checkpoints, always_to_bound=length_known)
    facts = {"bound": bound, "carry_bytes": SMALL_STORE_BYTES + 1, "length_known": length_known, "has_inverse": False}
    plan: Plan | None = asked._saving(**facts)
    if residuals and bound and checkpoints and (last := last_steps(bound, checkpoints, 1, 1)):
        plan = BlocksThenResiduals(Blocks(last.block, record_bytes=1), last.recorded, otherwise=asked)
    return SchedulePicture(steps, plan or EveryCarry(), records=residuals and plan is not None)
