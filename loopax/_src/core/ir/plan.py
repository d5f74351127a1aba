"""What the forward pass of a gradient stores for the backward pass: the answer of a kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from loopax._src import schedule
from loopax._src.schedule.saving import Saving

# Not NamedTuples: those compare as tuples, and all of the empty ones would be equal as keys of caches.


class Storage(ABC):
    """What a loop knows of its gradient: a plan, or the kind that will make one (`core/ir/kind.py`)."""

    @property
    @abstractmethod
    def needs_bound(self) -> bool:
        """Whether something is stored for every step."""

    @abstractmethod
    def planned(self, facts_for: Callable[[Any], Any]) -> "Plan":
        """The plan. `facts_for` says what a kind may know of the loop."""

    @abstractmethod
    def part(self, share: float) -> "Storage":
        """For one of several loops that together store what one would."""


class Plan(Storage):
    """What is stored. Take one of the subclasses: `Checkpoints`, `EveryCarry`, `EveryResidual`, `NoReverseMode`."""

    reason: str  # why it was chosen; empty: no other was considered
    stores_residuals: ClassVar[bool] = False  # of every step, instead of carries

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind that always stores this, as a user writes it."""

    @property
    def needs_bound(self) -> bool:
        """See `Storage.needs_bound`."""
        return False

    def because(self, reason: str) -> Self:
        """The plan with this reason."""
        return replace(self, reason=reason)  # pyright: ignore[reportArgumentType] - all plans are dataclasses

    @property
    def error(self) -> Exception | None:
        """Why there is no reverse mode; None: there is."""
        return None

    def saving(self, bound: int | None, carry_bytes: int, length_known: bool) -> Saving | None:
        """Which carries of so many bytes the loop saves on its way; None: that before every step, as rows."""
        del bound, carry_bytes, length_known
        return None

    def planned(self, facts_for: Callable[[Any], Any]) -> "Plan":
        """See `Storage.planned`."""
        del facts_for
        return self

    def part(self, share: float) -> "Plan":
        """See `Storage.part`."""
        del share
        return self


@dataclass(frozen=True)
class Checkpoints(Plan):
    """Some carries, from which the others are found again: this many, or about 2 sqrt(bound)."""

    count: int | None = None
    always_to_bound: bool = False  # the loop takes as many steps as its bound, always
    reason: str = ""

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return "Checkpointed()" if self.count is None else f"Checkpointed({self.count})"

    def saving(self, bound: int | None, carry_bytes: int, length_known: bool) -> Saving | None:
        """See `Plan.saving`."""
        always = self.always_to_bound
        return schedule.saving_for(self.count, bound, carry_bytes, length_known=length_known, always_to_bound=always)


@dataclass(frozen=True)
class EveryCarry(Plan):
    """The carry before every step; a step is evaluated again for its derivative."""

    reason: str = ""

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return "Bounded()"

    @property
    def needs_bound(self) -> bool:
        """See `Storage.needs_bound`."""
        return True


@dataclass(frozen=True)
class EveryResidual(Plan):
    """What the derivative of every step needs; nothing is evaluated again."""

    reason: str = ""
    stores_residuals: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return "Residuals()"

    @property
    def needs_bound(self) -> bool:
        """See `Storage.needs_bound`."""
        return True


@dataclass(frozen=True)
class NoReverseMode(Plan):
    """Nothing: reverse mode is refused with this error."""

    error_type: type[Exception]
    message: str
    reason: str = ""

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return "Lax()"

    @property
    def error(self) -> Exception:
        """See `Plan.error`."""
        return self.error_type(self.message)
