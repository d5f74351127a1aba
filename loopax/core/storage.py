"""What reverse mode stores of a loop: the part of a kind that the core needs to know."""

from typing import NamedTuple


class Blocks(NamedTuple):
    """The carry at the start of every block of about sqrt(bound) steps; a block is replayed."""


class EveryCarry(NamedTuple):
    """The carry before every step; a step is evaluated again for its derivative."""


class EveryResidual(NamedTuple):
    """What the derivative of every step needs; nothing is evaluated again."""


class Nothing(NamedTuple):
    """Reverse mode is refused with this error."""

    error: type[Exception]
    message: str


Storage = Blocks | EveryCarry | EveryResidual | Nothing
