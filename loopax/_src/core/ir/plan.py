"""What the forward pass of a gradient stores for the backward pass: the answer of a kind.

A kind answers with a plan. A `Saving` is a plan whose sizes and positions are resolved for one loop: which carries the
loop saves on its way. `Plan._saving` resolves. How each is compiled stands in `core/lowering`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from loopax._src.schedule.blocks import block_size, shortest_block
from loopax._src.settings import calibration

# Not NamedTuples: those compare as tuples, and all of the empty ones would be equal as keys of caches.


class Plan:
    """What a gradient stores: the result of `Kind.plan`.

    Return one of the subclasses: `Checkpoints`, `EveryCarry`, `EveryResidual`, `LastCarry` or `NoReverseMode`. The
    argument `reason` of each is a text that `explain` shows.
    """

    reason: str = ""  # why it was chosen; empty: no other was considered
    _name: ClassVar[str] = ""
    stores_residuals: ClassVar[bool] = False  # of every step, instead of carries
    keeps_all: bool = False
    walks_back: ClassVar[bool] = False  # to the states, by the inverse of a step, where there is one
    needs_bound: ClassVar[bool] = False  # something is stored for every step

    @property
    def name(self) -> str:
        """The name of the kind that always stores this."""
        return self._name

    @property
    def error(self) -> Exception | None:
        """The error that reverse mode raises; None if reverse mode works."""
        return None

    def because(self, reason: str) -> Self:
        """Return the plan with this reason."""
        return replace(self, reason=reason)  # pyright: ignore[reportArgumentType] - all plans are dataclasses

    def _saving(self, *, bound: int | None, carry_bytes: int, length_known: bool, has_inverse: bool) -> "Saving | None":
        """Which carries of so many bytes a loop saves on its way; None: what it stores of every step are rows.

        `length_known`: whether the number of steps is known when the loop starts. `has_inverse`: whether the loop can
        walk back.
        """
        del bound, carry_bytes, length_known, has_inverse
        return None


@dataclass(frozen=True)
class EveryCarry(Plan):
    """Store the carry before every step; recompute each step for its derivative.

    Parameters
    ----------
    reason
        Why this plan was chosen, for `explain`. Empty: no other plan was considered.

    """

    reason: str = ""
    needs_bound: ClassVar[bool] = True
    _name: ClassVar[str] = "Bounded()"


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
    needs_bound: ClassVar[bool] = True
    _name: ClassVar[str] = "Residuals()"


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
    _name: ClassVar[str] = "Lax()"

    def __post_init__(self) -> None:
        """Refuse what cannot be raised."""
        if not (isinstance(self.error_type, type) and issubclass(self.error_type, Exception)):
            raise TypeError(f"kinds.NoReverseMode({self.error_type!r}, ...): expected a class of errors.")

    @property
    def error(self) -> Exception:
        """See `Plan.error`."""
        return self.error_type(self.message)


@dataclass(frozen=True)
class Checkpoints(Plan):
    """Store some carries, and recompute the carries between them.

    Parameters
    ----------
    checkpoints
        The most carries that are stored. None: about 2 sqrt(bound), or 64 without a bound.
    always_to_bound
        Whether the loop always takes as many steps as its bound. True allows simpler schedules.
    reason
        Why this plan was chosen, for `explain`. Empty: no other plan was considered.

    """

    checkpoints: int | None = None
    always_to_bound: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse a count that is none."""
        if self.checkpoints is None:
            return
        if isinstance(self.checkpoints, bool) or not hasattr(self.checkpoints, "__index__"):
            raise TypeError(
                f"kinds.Checkpoints({self.checkpoints!r}): expected an int, the most carries stored, or None."
            )
        if self.checkpoints < 1:
            raise ValueError(f"kinds.Checkpoints({self.checkpoints!r}): expected at least 1, the most carries stored.")

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return "Checkpointed()" if self.checkpoints is None else f"Checkpointed({self.checkpoints})"

    def _saving(self, *, bound: int | None, carry_bytes: int, length_known: bool, **_: Any) -> "Saving | None":
        """See `Plan._saving`.

        With at least about 2 sqrt(bound) checkpoints: two levels of blocks, which need no schedule while the loop runs.
        For a bound of 1000, these need at most 2 % more evaluations than the binomial schedule with up to 303
        checkpoints, and 25 % more with 999.
        """
        if bound is None:
            return Slots(self.checkpoints or DEFAULT_SLOTS, length_known)
        if self.checkpoints is None:
            size = block_size(bound, carry_bytes, self.always_to_bound)
            return Blocks.of(size, bound, self.always_to_bound) if size > 1 else None
        if self.checkpoints >= bound:
            return None
        size = shortest_block(bound, self.checkpoints) if self.always_to_bound else None
        return Blocks.of(size, bound, True) if size else Slots(self.checkpoints, length_known)


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

    """

    otherwise: Checkpoints = Checkpoints()
    reason: str = ""
    walks_back: ClassVar[bool] = True
    _name: ClassVar[str] = "the last carry and an inverse"

    def __post_init__(self) -> None:
        """Refuse what is stored in place of an inverse, if it is no checkpoints."""
        if type(self.otherwise) is not Checkpoints:
            raise TypeError(f"kinds.LastCarry(otherwise={self.otherwise!r}): expected kinds.Checkpoints(...).")

    def _saving(self, **facts: Any) -> "Saving | None":
        return WalkBack(self.otherwise)._saving(**facts)


# Plans with sizes and positions: what a loop saves on its way.


class Saving(Plan, ABC):
    """Some carries, which the loop saves on its way forward."""

    reuses_room: ClassVar[bool] = False  # what a replay stores takes the room of saved carries
    record_bytes: int = 0  # a replay may store residuals of so many bytes for a step, also if carries are smaller
    # (start, end of the way back, last carry, results) -> results: checks that the first two are equal. Of an inverse.
    drift: Callable[[Any, Any, Any, Any], Any] | None = None

    @abstractmethod
    def rows(self, bound: int | None) -> int:
        """The most carries that are saved."""

    def num_checkpoint_rows(self) -> int:
        """How many numbers of rows are remembered with them: the first row, from which the others follow."""
        return 1

    def _saving(self, **_: Any) -> "Saving | None":
        return self


@dataclass(frozen=True)
class Blocks(Saving):
    """The carry at the start of every block of steps."""

    size: int  # steps in a block
    record_bytes: int = field(default=0, repr=False)  # as in `Saving`
    last: int | None = field(default=None, repr=False)  # steps in the last one, if the loop takes all; None: it varies
    _name: ClassVar[str] = "Checkpointed()"

    @classmethod
    def of(cls, size: int, bound: int, is_fixed: bool, record_bytes: int = 0) -> "Blocks":
        """Of a loop that takes at most `bound` steps, or always as many. XLA would make no loop of a single block."""
        return cls(size, record_bytes, (bound - 1) % size + 1 if is_fixed and size < bound else None)

    @property
    def are_even(self) -> bool:
        """Whether no block has fewer steps."""
        return self.last == self.size

    @property
    def are_known(self) -> bool:
        """Whether a compiler may know how many steps each has: on a CPU, only if all have as many."""
        return self.are_even or (self.last is not None and bool(calibration().look))

    def rows(self, bound: int | None) -> int:
        """See `Saving.rows`."""
        return -(-(bound or 0) // self.size)


@dataclass(frozen=True)
class Slots(Saving):
    """At most `count` carries, by the binomial schedule, or by the online schedule if the length is unknown."""

    count: int
    length_known: bool
    reuses_room: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return f"Checkpointed({self.count})"

    def rows(self, bound: int | None) -> int:
        """See `Saving.rows`."""
        del bound
        return self.count

    def num_checkpoint_rows(self) -> int:
        """The row of each slot; or, of unknown length, all rows in ascending order, then their slots in this order.

        The last number says how many slots are in use.
        """
        return (self.count if self.length_known else 2 * self.count) + 1


@dataclass(frozen=True)
class WalkBack(Saving):
    """The last carry, from which an inverse walks back to the others."""

    otherwise: Checkpoints = Checkpoints()  # where a loop has no inverse
    drift: Callable[[Any, Any, Any, Any], Any] | None = field(default=None, repr=False)  # as in `Saving`
    walks_back: ClassVar[bool] = True
    _name: ClassVar[str] = "the last carry and an inverse"

    def rows(self, bound: int | None) -> int:
        """See `Saving.rows`."""
        del bound
        return 1

    def _saving(self, **facts: Any) -> Saving | None:
        return self if facts["has_inverse"] else self.otherwise._saving(**facts)


@dataclass(frozen=True)
class BlocksThenResiduals(Plan):
    """The carries at the starts of blocks, then the residuals of the last steps, where a loop can be made of two."""

    blocks: Blocks
    recorded: int  # so many last steps
    otherwise: Checkpoints
    reason: str = ""

    @property
    def name(self) -> str:
        """See `Plan.name`."""
        return self.otherwise.name

    def _saving(self, **facts: Any) -> Saving | None:
        return self.otherwise._saving(**facts)  # of a loop that is not made of two


# Slots of a loop without a bound. Forward and gradient evaluate the body at most three times per step up to
# 2187 steps, four times up to 35 594 (docs/kinds.md).
DEFAULT_SLOTS = 64


def with_known_length(saving: Saving) -> Saving:
    """How to save in a loop over the rows that another loop has walked: their number is known."""
    return replace(saving, length_known=True) if isinstance(saving, Slots) else saving
