"""What the forward pass of a gradient stores for the backward pass: the answer of a kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from loopax._src import schedule
from loopax._src.schedule.saving import Blocks, Last, Saving

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

    def stored_by(self, kind: Any) -> "Storage":
        """What this kind would store instead; a plan stays what it is."""
        del kind
        return self


class Plan(Storage):
    """What a gradient stores: the result of `Kind.plan`.

    Return one of the subclasses: `Checkpoints`, `EveryCarry`, `EveryResidual`, `LastCarry` or `NoReverseMode`. The
    argument `reason` of each is a text that `explain` shows.
    """

    reason: str  # why it was chosen; empty: no other was considered
    stores_residuals: ClassVar[bool] = False  # of every step, instead of carries
    keeps_all: bool = False
    walks_back: ClassVar[bool] = False  # to the states, by the inverse of a step, where there is one

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the kind that always stores this."""

    @property
    def needs_bound(self) -> bool:
        """See `Storage.needs_bound`."""
        return False

    def because(self, reason: str) -> Self:
        """Return the plan with this reason."""
        return replace(self, reason=reason)  # pyright: ignore[reportArgumentType] - all plans are dataclasses

    @property
    def error(self) -> Exception | None:
        """The error that reverse mode raises; None if reverse mode works."""
        return None

    def saving(self, bound: int | None, carry_bytes: int, length_known: bool, has_inverse: bool) -> Saving | None:
        """Which carries of so many bytes the loop saves on its way; None: that before every step, as rows."""
        del bound, carry_bytes, length_known, has_inverse
        return None

    def shown(self, saving: Saving | None) -> Saving | None:
        """What a loop that saves so is said to do: it may be made of two loops."""
        return saving

    def in_two(self, bound: int) -> "TwoPlans | None":
        """Where a loop that takes so many steps is made of two: what each of them stores. None: it is not."""
        del bound
        return None

    def planned(self, facts_for: Callable[[Any], Any]) -> "Plan":
        """See `Storage.planned`."""
        del facts_for
        return self

    def part(self, share: float) -> "Plan":
        """See `Storage.part`."""
        del share
        return self


class TwoPlans(NamedTuple):
    """Of a loop that is made of two."""

    first: Plan
    num_steps: int  # of the first
    last: Plan


@dataclass(frozen=True)
class Checkpoints(Plan):
    """Store some carries, and recompute the carries between them.

    Parameters
    ----------
    count
        The most carries that are stored. None: about 2 sqrt(bound), or 64 without a bound.
    always_to_bound
        Whether the loop always takes as many steps as its bound. True allows simpler schedules.
    reason
        Why this plan was chosen, for `explain`. Empty: no other plan was considered.
    blocks
        Blocks of steps with stored residuals. loopax sets this argument; the default is None.

    """

    count: int | None = None
    always_to_bound: bool = False  # the loop takes as many steps as its bound, always
    reason: str = ""
    # Blocks with residuals, for a loop that takes as many steps as its bound. Those of the last steps are stored on the
    # way forward where the loop can be made of two (`core/autodiff/planning.py`).
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        """Refuse a count that is none."""
        if self.count is None:
            return
        if isinstance(self.count, bool) or not hasattr(self.count, "__index__"):
            raise TypeError(f"kinds.Checkpoints({self.count!r}): expected an int, the most carries stored, or None.")
        if self.count < 1:
            raise ValueError(f"kinds.Checkpoints({self.count!r}): expected at least 1, the most carries stored.")

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return "Checkpointed()" if self.count is None else f"Checkpointed({self.count})"

    def saving(self, bound: int | None, carry_bytes: int, length_known: bool, has_inverse: bool) -> Saving | None:
        """See `Plan.saving`."""
        del has_inverse
        if self.blocks is not None and not self.blocks.recorded:
            return self.blocks
        always = self.always_to_bound
        return schedule.saving_for(self.count, bound, carry_bytes, length_known=length_known, always_to_bound=always)

    def shown(self, saving: Saving | None) -> Saving | None:
        """See `Plan.shown`."""
        return self.blocks or saving

    def in_two(self, bound: int) -> TwoPlans | None:
        """See `Plan.in_two`."""
        if self.blocks is None or not self.blocks.recorded:
            return None
        first = replace(self, blocks=self.blocks.without_recorded)
        return TwoPlans(first, bound - self.blocks.recorded, EveryResidual(self.reason))


@dataclass(frozen=True)
class LastCarry(Plan):
    """Store the carry after the last step; the inverse of the kind computes the earlier carries.

    Parameters
    ----------
    otherwise
        The checkpoints that are stored where a loop has no inverse: in the linear part of a second derivative, and in
        loops with buffers in the carry.
    reason
        Why this plan was chosen, for `explain`. Empty: no other plan was considered.
    drift
        A check at the end of the reverse sweep. loopax sets this argument; the default is None.

    """

    otherwise: Checkpoints = Checkpoints()
    reason: str = ""
    drift: Callable[[Any, Any, Any, Any], Any] | None = None  # as in `Saving`
    walks_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what is stored in place of an inverse, if it is no checkpoints."""
        if type(self.otherwise) is not Checkpoints:
            raise TypeError(f"kinds.LastCarry(otherwise={self.otherwise!r}): expected kinds.Checkpoints(...).")

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return "the last carry and an inverse"

    def saving(self, bound: int | None, carry_bytes: int, length_known: bool, has_inverse: bool) -> Saving | None:
        """See `Plan.saving`."""
        return Last(self.drift) if has_inverse else self.otherwise.saving(bound, carry_bytes, length_known, has_inverse)


@dataclass(frozen=True)
class EveryCarry(Plan):
    """Store the carry before every step; recompute each step for its derivative.

    Parameters
    ----------
    reason
        Why this plan was chosen, for `explain`. Empty: no other plan was considered.

    """

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
    """Store what the derivative of every step needs; recompute no step.

    Parameters
    ----------
    reason
        Why this plan was chosen, for `explain`. Empty: no other plan was considered.
    keeps_all
        Whether to store all residuals, as `jax.lax.scan` does. False: a residual that is cheaper to compute from other
        residuals than to store is not stored.

    """

    reason: str = ""
    keeps_all: bool = False  # as `jax.lax.scan` does
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
    """Store nothing: reverse mode raises this error.

    Parameters
    ----------
    error_type
        The type of the error.
    message
        The message of the error.
    reason
        Why this plan was chosen, for `explain`. Empty: no other plan was considered.

    """

    error_type: type[Exception]
    message: str
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be raised."""
        if not (isinstance(self.error_type, type) and issubclass(self.error_type, Exception)):
            raise TypeError(f"kinds.NoReverseMode({self.error_type!r}, ...): expected a class of errors.")

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return "Lax()"

    @property
    def error(self) -> Exception:
        """See `Plan.error`."""
        return self.error_type(self.message)
