"""Numbers among the arguments that have to be known when a loop is traced."""

from operator import index
from typing import Any

import jax

from loopax._carry import describe


def static_int(what: str, value: Any) -> int:
    """A number known when the loop is traced."""
    number = _as_int(value)
    if number is None:
        raise TypeError(f"{what}: got {describe(value)}, expected an int.")
    return number


def positive_int(what: str, value: Any, unit: str, decided: str) -> int:
    """A number of something from 1 on; `decided`: what is decided by it."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{what}: got {describe(value)}, expected a Python int: {decided} when the loop is compiled, not when it "
            "runs."
        )
    number = _as_int(value)
    if number is None:
        raise TypeError(f"{what}: got {describe(value)}, expected an int, the number of {unit}.")
    if number < 1:
        raise ValueError(f"{what}: got {number}, expected at least 1, the number of {unit}.")
    return number


def _as_int(value: Any) -> int | None:
    """The int, or None for what is not one; a bool is none."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None
