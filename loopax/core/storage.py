"""What reverse mode stores of a loop: the part of a kind that the core needs to know."""

from dataclasses import dataclass

# Not NamedTuples: those compare as tuples, and all of the empty ones would be equal as keys of caches.


@dataclass(frozen=True)
class Blocks:
    """The carry at the start of every block of about sqrt(bound) steps; a block is replayed."""


@dataclass(frozen=True)
class EveryCarry:
    """The carry before every step; a step is evaluated again for its derivative."""


@dataclass(frozen=True)
class EveryResidual:
    """What the derivative of every step needs; nothing is evaluated again."""


@dataclass(frozen=True)
class Nothing:
    """Reverse mode is refused with this error."""

    error: type[Exception]
    message: str


Storage = Blocks | EveryCarry | EveryResidual | Nothing
