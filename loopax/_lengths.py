"""How many steps a loop may take, from static and traced limits."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from loopax._arguments import Words, is_traced_int
from loopax._checks import Check
from loopax.core.jaxprs import MOST_STEPS


@dataclass(frozen=True)
class Extent:
    """The rows of a loop and the limits on its steps."""

    low: Any
    high: Any
    bound: int | None  # static: rows are below it
    fixed: bool  # always the same number of steps, known when traced
    over_limit: Any = False  # bool or bool[]: max_steps is less than the length
    checks: list[Check] = field(default_factory=list)
    capacity: int | None = None  # rows of ys, where there are any
    is_precaution: bool = False  # the bound is `max_steps`, which may be far above the steps that are taken


def known_int(value: Any) -> int | None:
    """The integer, where it is known now: also an array outside of `jit`."""
    return None if value is None or isinstance(value, Tracer) else int(value)


def fori_extent(lower: Any, upper: Any, max_steps: int | None) -> Extent:
    """The steps of a `fori_loop`."""
    for name, value in (("lower", lower), ("upper", upper)):
        is_traced_int(f"fori_loop({name}=...)", value)
    jnp.result_type(lower, upper)  # refuses types that do not go together, under strict promotion
    first, last = known_int(lower), known_int(upper)
    if first is not None and last is not None:
        return _fixed_extent("fori_loop", max(last - first, 0), max_steps)
    length, too_long, longest = _difference(lower, upper, first)
    if max_steps is not None:
        over = longest > max_steps and (too_long | (length > max_steps))
        high = jnp.minimum(length, max_steps)
        return Extent(jnp.int32(0), high, max_steps, fixed=False, over_limit=over, is_precaution=True)
    checks = [] if too_long is False else [Check(too_long, _TOO_LONG)]
    return Extent(jnp.int32(0), length, None, fixed=False, checks=checks)


def first_index(lower: Any, upper: Any) -> tuple[jax.Array, bool]:
    """`lower` as an array of the index's dtype, and whether the index is weakly typed, as Python numbers are."""
    if known_int(lower) is not None and known_int(upper) is not None:
        return jnp.asarray(int(lower)), True  # as `jax.lax` has it, also where they are arrays
    dtype = jnp.result_type(lower, upper)
    start = jnp.asarray(lower)
    is_weak = jax.typeof(start).weak_type and start.dtype == dtype
    return lax.convert_element_type(start, dtype), is_weak


_TOO_LONG = f"loopax.fori_loop: upper - lower is more than {MOST_STEPS}, to which step counts go."


def _fixed_extent(name: str, length: int, max_steps: int | None) -> Extent:
    if length > MOST_STEPS:
        raise ValueError(f"{name}: {length} steps are more than {MOST_STEPS}, to which step counts go.")
    steps = length if max_steps is None else min(length, max_steps)
    return Extent(jnp.int32(0), jnp.int32(steps), steps, fixed=steps == length, over_limit=steps < length)


def _difference(lower: Any, upper: Any, first: int | None) -> tuple[Any, Any, int]:
    """max(upper - lower, 0) as int32, whether that is too small, and the longest that there can be.

    Whether is False, not an array, where it cannot be. `first` is `lower` where it is known.
    """
    dtype = jnp.result_type(lower, upper)
    limits = jnp.iinfo(dtype)
    longest = int(limits.max) - (int(limits.min) if first is None else first)
    dtype = dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.int32)
    lower, upper = (lax.convert_element_type(x, dtype) for x in (lower, upper))
    ahead = upper > lower
    length = jnp.where(ahead, upper - lower, jnp.zeros((), dtype))
    if longest <= MOST_STEPS:
        return length.astype(jnp.int32), False, longest
    too_long = (length < 0) | (length > MOST_STEPS)
    return jnp.where(too_long, MOST_STEPS, length).astype(jnp.int32), too_long, longest


def scan_extent(
    words: Words, length: Any, rows: int | None, max_steps: int | None, reverse: bool, stops: bool
) -> Extent:
    """The steps of a `scan` over `rows` rows of xs (None: no arrays in xs)."""
    if length is None:
        return _scan_without_length(words, rows, max_steps, reverse, stops)
    is_array = is_traced_int(f"{words.name}(length=...)", length)
    known = known_int(length)
    if known is not None:
        _check_known_length(words, known, rows)
        if not is_array or (rows is None and max_steps is None):
            return _static_scan(known, rows, max_steps, reverse)
    return _traced_scan(words, length, rows, max_steps, reverse)


def _check_known_length(words: Words, length: int, rows: int | None) -> None:
    name, xs = words.name, words.xs
    if length < 0 or length > MOST_STEPS:
        raise ValueError(f"{name}(length=...): got {length}, expected an int from 0 to {MOST_STEPS}.")
    if rows is not None and length > rows:
        raise ValueError(
            f"{name}(length=...): got {length}, but {xs} has {rows} rows. Give at most {rows}, or more rows of {xs}."
        )


def _scan_without_length(words: Words, rows: int | None, max_steps: int | None, reverse: bool, stops: bool) -> Extent:
    if rows is not None:
        return _static_scan(rows, rows, max_steps, reverse)
    if not stops:
        raise ValueError(
            f"{words.name} does not know how many steps to take: {words.xs} has no arrays, and neither `length` nor "
            "`stop` is given. Give one of them."
        )
    if reverse:
        raise ValueError("scan(reverse=True) starts at the last row, so it needs `xs` or `length`.")
    high = jnp.int32(MOST_STEPS if max_steps is None else max_steps)
    over = max_steps is not None
    return Extent(jnp.int32(0), high, max_steps, fixed=False, over_limit=over, capacity=max_steps, is_precaution=True)


def _static_scan(length: int, rows: int | None, max_steps: int | None, reverse: bool) -> Extent:
    capacity = length if rows is None else rows
    steps = length if max_steps is None else min(length, max_steps)
    low, high = (length - steps, length) if reverse else (0, steps)
    return Extent(
        jnp.int32(low), jnp.int32(high), high, fixed=steps == length, over_limit=steps < length, capacity=capacity
    )


def _traced_scan(words: Words, length: Any, rows: int | None, max_steps: int | None, reverse: bool) -> Extent:
    """A length known at run time: it may not be negative, nor beyond the rows of xs."""
    most, top = int(jnp.iinfo(length.dtype).max), MOST_STEPS if rows is None else rows
    negative = jnp.issubdtype(length.dtype, jnp.signedinteger) and length < 0
    beyond = most > top and length > top
    checks = []
    if (wrong := negative | beyond) is not False:
        checks = [Check(wrong, _length_message(words, rows))]
    length = jnp.clip(length, 0, min(top, most)).astype(jnp.int32)
    over = max_steps is not None and min(top, most) > max_steps and length > max_steps
    if max_steps is None:
        low, high, bound = jnp.int32(0), length, rows
    elif not reverse:
        low, high, bound = jnp.int32(0), jnp.minimum(length, max_steps), min(top, max_steps)
    elif rows is not None:
        low, high, bound = jnp.maximum(length - max_steps, 0), length, rows
    else:  # without rows of xs, max_steps is the capacity: the last row that there can be is the first walked
        low, high, bound = jnp.int32(0), jnp.minimum(length, max_steps), max_steps
    capacity = rows if rows is not None else max_steps
    return Extent(
        low,
        high,
        bound,
        fixed=False,
        over_limit=over,
        checks=checks,
        capacity=capacity,
        is_precaution=rows is None,
    )


def _length_message(words: Words, rows: int | None) -> str:
    most = f"{words.xs} has {rows} rows" if rows is not None else f"step counts go to {MOST_STEPS}"
    return (
        f"loopax.{words.name}: `length` is negative, or more than there is ({most}). "
        "Give a length within the data, or throw=False to take what there is."
    )
