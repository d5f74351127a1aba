"""What reverse mode stores of a loop: the part of a kind that the core needs to know."""

from dataclasses import dataclass, replace

from loopax.schedule import block_size, shortest_block

# Not NamedTuples: those compare as tuples, and all of the empty ones would be equal as keys of caches.

# Slots of a loop without a bound. Forward and gradient evaluate the body at most three times per step up to
# 2187 steps, four times up to 35 594 (docs/kinds.md).
DEFAULT_SLOTS = 64


@dataclass(frozen=True)
class Checkpoints:
    """Some carries, from which the others are found again: this many, or about 2 sqrt(bound)."""

    count: int | None = None
    always_to_bound: bool = False  # the loop takes as many steps as its bound, always
    reason: str = ""  # why it was chosen


@dataclass(frozen=True)
class EveryCarry:
    """The carry before every step; a step is evaluated again for its derivative."""

    reason: str = ""


@dataclass(frozen=True)
class EveryResidual:
    """What the derivative of every step needs; nothing is evaluated again."""

    reason: str = ""


@dataclass(frozen=True)
class Fastest:
    """The fastest of the above that fits in so many bytes, chosen when a gradient is taken (`core/choice.py`)."""

    memory: int
    is_precaution: bool  # the bound on the steps may be far above what is taken
    share: float = 1.0  # the part of the memory that is for this loop

    @property
    def budget(self) -> int:
        """Bytes for this loop."""
        return int(self.memory * self.share)


@dataclass(frozen=True)
class Nothing:
    """Reverse mode is refused with this error."""

    error: type[Exception]
    message: str


def part_of(storage: "Storage", share: float) -> "Storage":
    """For one of several loops that together store what one would."""
    return replace(storage, share=storage.share * share) if isinstance(storage, Fastest) else storage


Storage = Checkpoints | EveryCarry | EveryResidual | Fastest | Nothing


@dataclass(frozen=True)
class Blocks:
    """A loop saves the carry at the start of every block of so many steps."""

    size: int

    def rows(self, bound: int | None) -> int:
        """The most carries that are saved."""
        return -(-(bound or 0) // self.size)

    def num_marks(self) -> int:
        """Rows to remember: the first, from which the starts of all blocks follow."""
        return 1


@dataclass(frozen=True)
class Slots:
    """A loop saves its carry in so many slots: the binomial schedule, or the online one for an unknown length."""

    count: int
    length_known: bool

    def rows(self, bound: int | None) -> int:
        """The most carries that are saved."""
        del bound
        return self.count

    def num_marks(self) -> int:
        """Rows to remember: of each slot."""
        return self.count


Saving = Blocks | Slots


def saving_for(storage: Checkpoints, bound: int | None, carry_bytes: int, length_known: bool) -> Saving | None:
    """How a loop saves what the storage asks for; None: the carry before every step.

    Two levels of blocks need no schedule while the loop runs. With at least about 2 sqrt(bound) checkpoints, and
    as many steps as the bound, they need hardly more evaluations than the binomial schedule (at most 2 %
    for a bound of 1000), so they are taken there.
    """
    if bound is None:
        return Slots(storage.count or DEFAULT_SLOTS, length_known)
    if storage.count is None:
        return _blocks(min(block_size(bound, carry_bytes), bound))
    if storage.count >= bound:
        return None
    size = shortest_block(bound, storage.count) if storage.always_to_bound else None
    return Blocks(size) if size else Slots(storage.count, length_known)


def saved_carries(bound: int, carry_bytes: int) -> int:
    """How many carries `Checkpoints()` stores for a bound."""
    size = block_size(bound, carry_bytes)
    return bound if size == 1 else -(-bound // size) + size


def _blocks(size: int) -> Saving | None:
    return Blocks(size) if size > 1 else None


def length_known(saving: Saving) -> Saving:
    """The same for a loop over the rows that another loop has walked."""
    return replace(saving, length_known=True) if isinstance(saving, Slots) else saving
