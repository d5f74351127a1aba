"""Kinds of loops: what a gradient stores, and what it evaluates again."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from loopax import core
from loopax._static import Why, positive_int, refuse_tracers

DEFAULT_MEMORY = 256 * 2**20
_CHECKPOINTS = Why(
    "how much memory a gradient uses",
    "give the most carries that there is room for: one budget serves every number of steps",
)
_MEMORY = Why(
    "what a gradient stores", "give the most bytes that a gradient may take: one budget serves every number of steps"
)
_KIND = Why("the program of a gradient", "choose one kind for all calls: values and derivatives do not depend on it")


class Kind(ABC):
    """A strategy for reverse mode. Choose one of its subclasses."""

    @abstractmethod
    def storage(self, bound: int | None, fixed: bool, is_precaution: bool) -> core.Storage:
        """What the core stores for a loop of at most `bound` steps.

        `fixed`: always as many, known when traced; `is_precaution`: perhaps far fewer.
        """


@dataclass(frozen=True)
class Lax(Kind):
    """The loop as `jax.lax` has it.

    Reverse mode works where it does in `jax.lax`, for a fixed number of steps, and stores what
    `jax.lax.scan` stores; elsewhere it is an error. Forward mode and `jax.vmap` work always.
    Body evaluations for forward and gradient: n. Bound: not needed.
    """

    def storage(self, bound: int | None, fixed: bool, is_precaution: bool) -> core.Storage:
        """See `Kind.storage`."""
        del bound, is_precaution
        if fixed:
            return core.EveryResidual()
        return core.Nothing(
            ValueError,
            "reverse mode through a loop of kind `Lax()` whose number of steps is not fixed when it is traced. "
            "Choose a kind that has it: `Checkpointed()` (some carries), or, with a static bound such as `max_steps=`, "
            "`Bounded()` (every carry) or `Residuals()` (what `jax.lax.scan` stores).",
        )


@dataclass(frozen=True)
class Checkpointed(Kind):
    """Store some carries, and evaluate the steps between them again.

    With a bound of N steps and without `checkpoints`, the carries at the start of blocks of steps and
    those of one block are stored: about 2 sqrt(N) in all (more where carries are so tiny that 8 KiB hold
    them). Forward and gradient evaluate the body at most 3 n times. N is `max_steps`, the rows of
    `xs`, or a static length.

    With `checkpoints` as many carries are stored, at most, those of a replayed block included. A loop
    that knows its length when it starts (`fori_loop`, `scan` without `stop`) needs as few evaluations as
    possible (Griewank & Walther 2000). One that does not (`while_loop`, `scan` with `stop`) needs at most
    1.15 times as many (an online schedule after Stumm & Walther 2010), and no bound.

    Without a bound and without `checkpoints`, 64 carries are stored. docs/kinds.md has the
    evaluations of every case.

    Parameters
    ----------
    checkpoints
        The number of stored carries, an int from 1 on, or None. A loop with fewer steps stores fewer.

    Raises
    ------
    TypeError
        `checkpoints` is not an int, or is traced.
    ValueError
        `checkpoints` is less than 1.

    """

    checkpoints: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is not a number of carries."""
        if self.checkpoints is not None:
            what = "Checkpointed(checkpoints=...)"
            number = positive_int(what, self.checkpoints, "stored carries", _CHECKPOINTS)
            object.__setattr__(self, "checkpoints", number)

    def storage(self, bound: int | None, fixed: bool, is_precaution: bool) -> core.Storage:
        """See `Kind.storage`."""
        del bound, is_precaution
        return core.Checkpoints(self.checkpoints, always_to_bound=fixed)


@dataclass(frozen=True)
class Bounded(Kind):
    """Store every carry, and evaluate every step again for its derivative.

    Body evaluations for forward and gradient: 2n. Needs a static bound: `max_steps`, the rows of `xs`,
    or a static length.
    """

    def storage(self, bound: int | None, fixed: bool, is_precaution: bool) -> core.Storage:
        """See `Kind.storage`."""
        del fixed, is_precaution
        _need_bound(self, bound)
        return core.EveryCarry()


@dataclass(frozen=True)
class Residuals(Kind):
    """Store what the derivative of every step needs, as `jax.lax.scan` does; evaluate nothing again.

    Body evaluations for forward and gradient: n. Needs a static bound: `max_steps`, the rows of `xs`,
    or a static length.
    """

    def storage(self, bound: int | None, fixed: bool, is_precaution: bool) -> core.Storage:
        """See `Kind.storage`."""
        del fixed, is_precaution
        _need_bound(self, bound)
        return core.EveryResidual()


@dataclass(frozen=True)
class Auto(Kind):
    """The default: the fastest of the other kinds that fits in so much memory.

    The choice is made where a gradient is taken, from the bound, the types in the carry, what the derivative
    of a step needs, and an estimate of what a step costs. It takes `Residuals()`, `Bounded()` or
    `Checkpointed()`, the last with as many checkpoints as fit; without a bound, `Checkpointed()` with up to
    64. Where the bound is `max_steps` and the length known only at run time, it may be far above the
    steps that are taken: then `Residuals()` and `Bounded()`, which need room for all of them, get an
    eighth of the memory. Only shapes that are visible there count: a `jax.vmap` outside of the
    gradient multiplies them.

    Where no gradient is taken, this is `Lax()`.

    Parameters
    ----------
    memory
        Bytes that the gradient of one loop may store: 256 MiB unless given. Never read from the device.

    Raises
    ------
    TypeError
        `memory` is not an int, or is traced.
    ValueError
        `memory` is less than 1; or, where a gradient is taken, less than one carry (the message says how
        much that is).

    """

    memory: int = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        """Refuse what is not a number of bytes."""
        object.__setattr__(self, "memory", positive_int("Auto(memory=...)", self.memory, "bytes", _MEMORY))

    def storage(self, bound: int | None, fixed: bool, is_precaution: bool) -> core.Storage:
        """See `Kind.storage`."""
        del bound, fixed
        return core.Fastest(self.memory, is_precaution)


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
    refuse_tracers("kind=...", kind, "a kind or the name of one", _KIND)
    if isinstance(kind, Kind):
        return kind
    if isinstance(kind, str) and kind in _BY_NAME:
        return _BY_NAME[kind]()
    choices = ", ".join(f"{name!r} ({cls.__name__}())" for name, cls in _BY_NAME.items())
    raise ValueError(f"kind={kind!r} is not a kind of loop. Choose one of {choices}.")
