"""Types at the public boundary."""

from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Bool, Int, PyTree

Predicate = Bool[Array, ""]


class RowByRow(eqx.Module):
    """A part of a pytree whose arrays of rows must be touched by its own operations only."""

    _rows: PyTree[Array]


class LoopInfo(NamedTuple):
    """How a loop ended; returned with `info=True`.

    Attributes
    ----------
    num_steps : int32[]
        The steps that the loop took. A loop without a bound counts up to 2147483647.
    limit_reached : bool[]
        Whether a limit stopped a loop that would have gone on. A limit is `max_steps`, the number of rows, or the
        largest count of steps.

    """

    num_steps: Int[Array, ""]
    limit_reached: Predicate
