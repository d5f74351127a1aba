"""What a schedule consists of."""

from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One action of a schedule on a machine with a forward step and a reverse step.

    The machine has a current carry, and stores others. `keep` stores the current carry, which is the
    one before `step`; `restore` makes it the current one again; `advance` evaluates `step`; `reverse`
    differentiates it, for which the carry before it must be the current one; `drop` frees it.
    """

    name: Literal["keep", "restore", "advance", "reverse", "drop"]
    step: int
