"""What reverse mode stores of a loop: the part of a kind that the core needs to know."""

from dataclasses import dataclass, replace

from loopax._src import schedule
from loopax._src.schedule.saving import Saving

# Not NamedTuples: those compare as tuples, and all of the empty ones would be equal as keys of caches.


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
    """The fastest of the above that fits in so many bytes; `autodiff/auto_policy.py` chooses, for a gradient."""

    memory: int
    bound_is_loose: bool  # the bound on the steps may be far above what is taken
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


def saving_for(storage: Checkpoints, bound: int | None, carry_bytes: int, length_known: bool) -> Saving | None:
    """How a loop saves what the storage asks for; None: the carry before every step."""
    always = storage.always_to_bound
    return schedule.saving_for(storage.count, bound, carry_bytes, length_known=length_known, always_to_bound=always)
