"""Types at the public boundary."""

from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Bool, Int, PyTree

Predicate = Bool[Array, ""]


class RowByRow(eqx.Module):
    """A part of a pytree whose arrays of rows must be touched by its own operations only."""

    _rows: PyTree[Array]


class LoopInfo(NamedTuple):
    """How a loop ended (`info=True`).

    Attributes
    ----------
    num_steps : int32[]
        Steps that were taken. A loop without a bound counts to 2147483647 and no further.
    limit_reached : bool[]
        Whether `max_steps`, a `length` beyond the data, or limits beyond what can be counted stopped a loop that would
        have gone on.

    """

    num_steps: Int[Array, ""]
    limit_reached: Predicate
