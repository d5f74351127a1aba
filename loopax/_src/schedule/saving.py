"""Which carries a loop saves on its way, and what its gradient does with them: a `Saving` for each way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isqrt
from typing import Any, ClassVar, NamedTuple

from loopax._src.schedule.binomial import Action, binomial, evaluations, evaluations_from, forward, replay
from loopax._src.schedule.online import online, online_stored

# The two-level schedule: keep the carry at the start of every block, replay one block at a time.


# XLA's CPU backend compiles a loop whose whole state is smaller than this to one function, without a
# call per operation: tiny loops run several times faster (measured in docs/how-it-works.md).
SMALL_LOOP_BYTES = 512
# Blocks may be shorter than sqrt(N) for the sake of such loops as long as the kept carries stay below:
SMALL_STORE_BYTES = 8 * 1024


def block_size(bound: int, carry_bytes: int) -> int:
    """The number of steps in a block, for at most `bound` steps and a carry of `carry_bytes` bytes.

    About sqrt(bound): then two levels store the fewest carries (one for each block, and those of one block), about
    2 sqrt(bound). Tiny carries have shorter blocks.
    """
    balanced = isqrt(max(bound - 1, 0)) + 1
    quick = max(SMALL_LOOP_BYTES // max(carry_bytes, 1), 1)
    if quick < balanced and carry_bytes * -(-bound // quick) <= SMALL_STORE_BYTES:
        return quick
    return balanced


def shortest_block(bound: int, checkpoints: int) -> int | None:
    """The fewest steps in a block for which two levels store at most `checkpoints` carries; None: these are too few.

    A shorter block recomputes fewer steps: all steps of a block but the last are recomputed.
    """
    sizes = (size for size in range(2, isqrt(bound) + 2) if -(-bound // size) + size <= checkpoints)
    return next(sizes, None)


class LastSteps(NamedTuple):
    """Two levels of blocks. The forward pass stores the residuals of the last steps, and recomputed steps theirs."""

    recorded: int  # so many last steps
    block: int  # steps per block of the others


def last_steps(bound: int, checkpoints: int, carry: int, residuals: int) -> LastSteps | None:
    """For how many of the last steps the residuals fit into the room of `checkpoints` carries.

    `carry` and `residuals` are the sizes of a carry, and of the residuals of a step. The gradient evaluates the body
    `2 * bound - recorded` times. None: even blocks do not fit, or with fewer than 2 sqrt(bound) carries, slots need
    fewer evaluations.
    """
    if checkpoints * checkpoints < 4 * bound:
        return None
    # While the forward pass stores residuals, the carries at the starts of blocks are stored, too. Later, what one
    # recomputed block stores takes the room of the forward pass's residuals.
    for starts in range(checkpoints + 1):
        left = (checkpoints - starts) * carry
        recorded = min(left // max(residuals, 1), bound)
        if recorded == bound:
            return LastSteps(recorded, 1)
        if starts:
            block = -(-(bound - recorded) // starts)
            if block * max(carry, residuals) <= left:
                return LastSteps(recorded, block)
    return None


def two_level(num_steps: int, block: int, records: bool = False, recorded: int = 0) -> Iterator[Action]:
    """The actions of the two-level schedule: store the start of each block of steps, recompute one block at a time.

    It stores at most `ceil(num_steps / block) + block` carries, and advances no step more than twice. Where it
    `records`, recomputed steps store residuals in place of carries. The forward pass stores the residuals of the last
    `recorded` steps. `core/lowering/sweep.py` compiles the same schedule.
    """
    replayed = num_steps - recorded
    for step in range(replayed):
        if step % block == 0:
            yield Action("keep", step)
        yield Action("advance", step)
    yield from (Action("record", step) for step in range(replayed, num_steps))
    yield from (Action("reverse", step) for step in reversed(range(replayed, num_steps)))
    for start in reversed(range(0, replayed, block)):
        end = min(start + block, replayed)
        yield Action("restore", start)
        if records:
            yield Action("drop", start)
            yield from (Action("record", step) for step in range(start, end))
            yield from (Action("reverse", step) for step in reversed(range(start, end)))
            continue
        for step in range(start, end - 1):
            yield Action("advance", step)
            yield Action("keep", step + 1)
        for step in reversed(range(start, end)):
            yield from (Action("restore", step), Action("reverse", step), Action("drop", step))


# What a loop saves: not NamedTuples, which compare as tuples, so that `Blocks(3)` would be equal to `(3,)` as a key of
# caches.


class Saving(ABC):
    """When a loop saves its carry. How it is compiled is in `core/lowering`, in a file for each."""

    reuses_room: ClassVar[bool] = False  # what a replay stores takes the room of saved carries
    # (start, end of the way back, last carry, results) -> results: checks that the first two are equal. Of an inverse.
    drift: Callable[[Any, Any, Any, Any], Any] | None = None
    record_bytes: int = 0  # a replay may store residuals of so many bytes for a step, also if carries are smaller

    @abstractmethod
    def rows(self, bound: int | None) -> int:
        """The most carries that are saved."""

    def num_checkpoint_rows(self) -> int:
        """How many numbers of rows are remembered with them: the first row, from which the others follow."""
        return 1

    def room(self, num_steps: int) -> int:
        """The carries for which a gradient of so many steps sets memory aside."""
        return self.rows(num_steps)

    def stored_bytes(self, num_steps: int, carry_bytes: int) -> int:
        """The memory that is."""
        return self.room(num_steps) * carry_bytes

    @abstractmethod
    def describe(self, num_steps: int) -> str:
        """The schedule in words."""

    def actions(self, num_steps: int, records: bool) -> Iterator[Action]:
        """All of it; where it `records`, replays store residuals in the place of carries."""
        raise NotImplementedError("a schedule by an inverse has no actions of checkpoints")

    def evaluations(self, num_steps: int, records: bool) -> int:
        """How often forward and gradient evaluate the body, from a formula: twice each step, if none is replayed."""
        del records
        return 2 * num_steps

    def derivatives(self, num_steps: int, records: bool) -> int:
        """How many of these are for derivatives of steps whose residuals are not stored."""
        return 0 if records else num_steps

    @property
    def is_counted_slowly(self) -> bool:
        """Whether `evaluations` follows the schedule step by step."""
        return False


@dataclass(frozen=True)
class Blocks(Saving):
    """Save the carry at the start of every block of steps."""

    size: int  # steps in a block
    record_bytes: int = field(default=0, repr=False)  # as in `Saving`
    recorded: int = field(default=0, repr=False)  # before the backward pass there are residuals of so many last steps

    def rows(self, bound: int | None) -> int:
        """See `Saving.rows`."""
        return -(-(bound or 0) // self.size)

    @property
    def without_recorded(self) -> "Blocks":
        """These blocks, for the steps whose residuals are not stored."""
        return replace(self, recorded=0)

    def room(self, num_steps: int) -> int:
        """See `Saving.room`: the carries at all starts, and those of one block."""
        return self.rows(num_steps - self.recorded) + max(self.size, self.recorded)

    def stored_bytes(self, num_steps: int, carry_bytes: int) -> int:
        """See `Saving.stored_bytes`."""
        starts, of_step = self.rows(num_steps - self.recorded), max(carry_bytes, self.record_bytes)
        return starts * carry_bytes + max(self.recorded * self.record_bytes, self.size * of_step)

    def describe(self, num_steps: int) -> str:
        """See `Saving.describe`."""
        blocks = self.rows(num_steps - self.recorded)
        if not blocks:
            return "residuals of every step"
        levels = f"two levels, {counted(blocks, 'block')} of {self.size} steps"
        return f"{levels}, then {self.recorded} steps with residuals" if self.recorded else levels

    def actions(self, num_steps: int, records: bool) -> Iterator[Action]:
        """See `Saving.actions`."""
        return two_level(num_steps, self.size, records, self.recorded)

    def evaluations(self, num_steps: int, records: bool) -> int:
        """See `Saving.evaluations`."""
        return 2 * num_steps - self.recorded if records else 3 * num_steps - self.rows(num_steps)


@dataclass(frozen=True)
class Slots(Saving):
    """Save at most `count` carries, by the binomial schedule, or by the online schedule if the length is unknown."""

    count: int
    length_known: bool
    reuses_room: ClassVar[bool] = True

    def rows(self, bound: int | None) -> int:
        """See `Saving.rows`."""
        del bound
        return self.count

    def num_checkpoint_rows(self) -> int:
        """The row of each slot."""
        return self.count

    def describe(self, num_steps: int) -> str:
        """See `Saving.describe`."""
        del num_steps
        kind = "binomial, known length" if self.length_known else "online, unknown length"
        return f"{kind}, at most {counted(self.count, 'carry', 'carries')}"

    def actions(self, num_steps: int, records: bool) -> Iterator[Action]:
        """See `Saving.actions`."""
        if self.length_known:
            return binomial(num_steps, self.count, records)
        return self._online_actions(num_steps, records)

    def _online_actions(self, num_steps: int, records: bool) -> Iterator[Action]:
        history = list(islice(online(self.count), num_steps))
        yield from forward(history)
        yield from replay(history[-1] if history else (), num_steps, self.count, records)

    def evaluations(self, num_steps: int, records: bool) -> int:
        """See `Saving.evaluations`."""
        if self.length_known:
            return evaluations(num_steps, self.count, records)
        return evaluations_from(online_stored(num_steps, self.count), num_steps, self.count, records)

    def derivatives(self, num_steps: int, records: bool) -> int:
        """See `Saving.derivatives`: residuals of some steps are stored."""
        return num_steps - self.evaluations(num_steps, False) + self.evaluations(num_steps, records)

    @property
    def is_counted_slowly(self) -> bool:
        """See `Saving.is_counted_slowly`."""
        return not self.length_known


@dataclass(frozen=True)
class Last(Saving):
    """Save the carry after the last step, from which an inverse walks back; its evaluations are not counted."""

    drift: Callable[[Any, Any, Any, Any], Any] | None = field(default=None, repr=False)  # as in `Saving`

    def rows(self, bound: int | None) -> int:
        """See `Saving.rows`."""
        del bound
        return 1

    def describe(self, num_steps: int) -> str:
        """See `Saving.describe`."""
        del num_steps
        return "the last carry, and an inverse"


@dataclass(frozen=True)
class EveryStep(Saving):
    """The carry before every step is stored, as rows: what loops mean where they have no `Saving`."""

    def rows(self, bound: int | None) -> int:
        """See `Saving.rows`."""
        return bound or 0

    def describe(self, num_steps: int) -> str:
        """See `Saving.describe`."""
        del num_steps
        return "every carry"

    def actions(self, num_steps: int, records: bool) -> Iterator[Action]:
        """See `Saving.actions`."""
        del records
        return two_level(num_steps, 1)


# Slots of a loop without a bound. Forward and gradient evaluate the body at most three times per step up to
# 2187 steps, four times up to 35 594 (docs/kinds.md).
DEFAULT_SLOTS = 64


def saving_for(
    checkpoints: int | None, bound: int | None, carry_bytes: int, *, length_known: bool, always_to_bound: bool
) -> Saving | None:
    """How a loop of kind `Checkpointed(checkpoints)` saves its carries; None: that before every step is stored.

    `length_known`: whether the number of steps is known when the loop starts. `always_to_bound`: whether the loop
    always takes as many steps as its bound. With at least about 2 sqrt(bound) checkpoints it has two levels of blocks,
    which need no schedule while the loop runs. For a bound of 1000, they need at most 2 % more evaluations than the
    binomial schedule with up to 303 checkpoints, and 25 % more with 999.
    """
    if bound is None:
        return Slots(checkpoints or DEFAULT_SLOTS, length_known)
    if checkpoints is None:
        size = block_size(bound, carry_bytes)
        return Blocks(size) if size > 1 else None
    if checkpoints >= bound:
        return None
    size = shortest_block(bound, checkpoints) if always_to_bound else None
    return Blocks(size) if size else Slots(checkpoints, length_known)


def saved_carries(bound: int, carry_bytes: int) -> int:
    """How many carries are stored for a bound where no number of checkpoints is given."""
    size = block_size(bound, carry_bytes)
    return bound if size == 1 else Blocks(size).room(bound)


def length_known(saving: Saving) -> Saving:
    """How to save in a loop over the rows that another loop has walked: their number is known."""
    return replace(saving, length_known=True) if isinstance(saving, Slots) else saving


def counted(number: int, one: str, several: str = "") -> str:
    """A number and a noun."""
    return f"{number} {one if number == 1 else several or one + 's'}"
