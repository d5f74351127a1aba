"""What a schedule consists of."""

from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One action of a schedule on a machine with a forward step and a reverse step.

    The machine has a current carry, and stores others. `keep` stores the current carry, which is the
    one before `step`; `restore` makes it the current one again; `drop` frees it. `advance` evaluates
    `step`; `record` does, too, and stores the residuals of the step. `reverse` differentiates it: with its
    residuals where these are stored, which are then dropped, or else by evaluating the step, for which
    the carry before it must be the current one.
    """

    name: Literal["keep", "restore", "advance", "record", "reverse", "drop"]
    step: int
