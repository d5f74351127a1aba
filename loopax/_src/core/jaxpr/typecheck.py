"""Whether the operands of an equation fit the bodies in it. Only `check_jaxpr` asks, under `jax_enable_checks` say.

A rule that mixes up operands, or forgets one, makes an equation that is wrong but can be traced: the types of results
follow from the bodies alone.
"""

from collections.abc import Sequence
from typing import Any

from jax import core

from loopax._src.core.jaxpr.util import INDEX, stacked
from loopax._src.jax_internals import JaxprTypeError, fits, varying_axes, with_varying_axes


def check_count(what: str, expected: int, given: Sequence[Any]) -> None:
    """Raise where there are more or fewer operands."""
    if len(given) != expected:
        raise JaxprTypeError(f"{what}: expected {expected} operands, got {len(given)}")


def check_types(what: str, expected: Sequence[Any], given: Sequence[Any]) -> None:
    """Raise where values of these types do not fit."""
    if not fits(expected, given):
        raise JaxprTypeError(f"{what}: expected ({_short(expected)}), got ({_short(given)})")


def check_rows(what: str, expected: Sequence[Any], given: Sequence[Any], rows: int | None) -> None:
    """Raise where these are not arrays with so many rows of the expected types."""
    check_types(what, [stacked(aval, rows or 0) for aval in expected], given)


def check_numbers(what: str, given: Sequence[Any], shape: tuple[int, ...] = ()) -> None:
    """Raise where these are not numbers of rows; they may vary over the axes of a `shard_map`."""
    index = core.ShapedArray(shape, INDEX.dtype)
    check_types(what, [with_varying_axes(index, varying_axes(aval)) for aval in given], given)


def _short(avals: Sequence[Any]) -> str:
    return ", ".join(str(aval) for aval in avals)
