"""Kinds of loops: what a gradient stores, and what it evaluates again."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from loopax import core


class Kind(ABC):
    """A strategy for reverse mode. Choose one of its subclasses."""

    @abstractmethod
    def storage(self, bound: int | None, fixed: bool) -> core.Storage:
        """What the core stores for a loop of at most `bound` steps; `fixed`: always as many, known when traced."""


@dataclass(frozen=True)
class Lax(Kind):
    """The loop as `jax.lax` has it.

    Reverse mode works where it does in `jax.lax`, for a fixed number of steps, and stores what
    `jax.lax.scan` stores; elsewhere it is an error. Forward mode and `jax.vmap` work always.
    Body evaluations for forward and gradient: n. Bound: not needed.
    """

    def storage(self, bound: int | None, fixed: bool) -> core.Storage:
        """See `Kind.storage`."""
        del bound
        if fixed:
            return core.EveryResidual()
        return core.Nothing(
            ValueError,
            "reverse mode through a loop of kind `Lax()` whose number of steps is not fixed when it is traced. "
            "Choose a kind that has it: `Checkpointed()` (about 2 sqrt(N) carries for a bound of N steps), "
            "`Bounded()` (every carry) or `Residuals()` (what `jax.lax.scan` stores), each with a static bound "
            "such as `max_steps=`.",
        )


@dataclass(frozen=True)
class Checkpointed(Kind):
    """Store the carry at the start of every block of steps, and evaluate the blocks again.

    With a bound of N steps about 2 sqrt(N) carries are stored (more where carries are so tiny that
    8 KiB hold them), at most 3n body evaluations are needed for forward and gradient. N is
    `max_steps`, the rows of `xs`, or a static length.

    Parameters
    ----------
    checkpoints
        The number of stored carries. Not implemented yet: leave it None.

    """

    checkpoints: int | None = None

    def storage(self, bound: int | None, fixed: bool) -> core.Storage:
        """See `Kind.storage`."""
        del fixed
        if self.checkpoints is not None:
            raise NotImplementedError(
                f"Checkpointed(checkpoints={self.checkpoints!r}): a budget of checkpoints is not implemented yet. "
                "Without it, about 2 sqrt(N) carries are stored for a bound of N steps."
            )
        if bound is None:
            return core.Nothing(
                NotImplementedError,
                "the gradient of a loop without a static bound is not implemented yet under `Checkpointed()` and "
                "`Auto()`. Give a bound: `max_steps=`, rows of `xs`, or a static length.",
            )
        return core.Blocks()


@dataclass(frozen=True)
class Bounded(Kind):
    """Store every carry, and evaluate every step again for its derivative.

    Body evaluations for forward and gradient: 2n. Needs a static bound: `max_steps`, the rows of `xs`,
    or a static length.
    """

    def storage(self, bound: int | None, fixed: bool) -> core.Storage:
        """See `Kind.storage`."""
        del fixed
        _need_bound(self, bound)
        return core.EveryCarry()


@dataclass(frozen=True)
class Residuals(Kind):
    """Store what the derivative of every step needs, as `jax.lax.scan` does; evaluate nothing again.

    Body evaluations for forward and gradient: n. Needs a static bound: `max_steps`, the rows of `xs`,
    or a static length.
    """

    def storage(self, bound: int | None, fixed: bool) -> core.Storage:
        """See `Kind.storage`."""
        del fixed
        _need_bound(self, bound)
        return core.EveryResidual()


@dataclass(frozen=True)
class Auto(Kind):
    """The default: `Checkpointed()` where a gradient is taken, `Lax()` where none is.

    Parameters
    ----------
    memory
        Bytes that a gradient may use. Not implemented yet: leave it None.

    """

    memory: int | None = None

    def storage(self, bound: int | None, fixed: bool) -> core.Storage:
        """See `Kind.storage`."""
        if self.memory is not None:
            raise NotImplementedError(
                f"Auto(memory={self.memory!r}): the choice by memory is not implemented yet. "
                "Without it, Auto() is Checkpointed()."
            )
        return Checkpointed().storage(bound, fixed)


def _need_bound(kind: Kind, bound: int | None) -> None:
    if bound is None:
        raise ValueError(
            f"kind={kind!r} stores something for every step, so it needs to know at most how many there are. "
            "Give a static bound: `max_steps=`, rows of `xs`, or a static length."
        )


KindLike = Kind | Literal["auto", "lax", "checkpointed", "bounded", "residuals"]
_BY_NAME: dict[str, type[Any]] = {
    "auto": Auto,
    "lax": Lax,
    "checkpointed": Checkpointed,
    "bounded": Bounded,
    "residuals": Residuals,
}


def to_kind(kind: KindLike) -> Kind:
    """The strategy object behind the `kind` argument."""
    if isinstance(kind, Kind):
        return kind
    if isinstance(kind, str) and kind in _BY_NAME:
        return _BY_NAME[kind]()
    choices = ", ".join(f"{name!r} ({cls.__name__}())" for name, cls in _BY_NAME.items())
    raise ValueError(f"kind={kind!r} is not a kind of loop. Choose one of {choices}.")
