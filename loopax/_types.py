"""Aliases for types at the public boundary."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Int, PyTree

Carry = PyTree[Any]
Rows = PyTree[Any]
Predicate = Bool[Array, ""]
BodyFun = Callable[..., Any]


class LoopInfo(NamedTuple):
    """How a loop ended (`info=True`).

    Attributes
    ----------
    num_steps : int32[]
        Steps that were taken. A loop without a bound counts to 2147483647 and no further.
    limit_reached : bool[]
        Whether `max_steps`, or a `length` beyond the data, stopped a loop that would have gone on.

    """

    num_steps: Int[Array, ""]
    limit_reached: Predicate
