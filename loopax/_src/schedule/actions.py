"""What a schedule consists of."""

from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One action of a schedule.

    A schedule runs on a machine with a current carry and a store of carries and residuals.

    Attributes
    ----------
    name : str
        What to do:

        - `"keep"`: store the current carry, which is the carry before `step`.
        - `"restore"`: make the stored carry before `step` the current carry.
        - `"advance"`: evaluate `step`.
        - `"record"`: evaluate `step`, and store its residuals.
        - `"reverse"`: differentiate `step`. If its residuals are stored, they are used and dropped. If not, `step` is
          evaluated, and the carry before it must be the current carry.
        - `"drop"`: free the stored carry before `step`.
    step : int
        The number of the step, from 0 on.

    """

    name: Literal["keep", "restore", "advance", "record", "reverse", "drop"]
    step: int
