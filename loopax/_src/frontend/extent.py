"""How many steps a loop may take, from static and traced limits."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.frontend.limits import Limits, is_size, known_int, width_of
from loopax._src.frontend.options import Words, is_traced_int
from loopax._src.frontend.raising import AMOUNT
from loopax._src.frontend.runtime_checks import Check
from loopax._src.pytrees.static_args import int_within


@dataclass(frozen=True)
class Extent:
    """The rows of a loop and the limits on its steps."""

    low: Any  # an int where it is known when traced, else int32[]
    high: Any  # likewise
    bound: int | None  # static: rows are below it
    fixed: bool  # always the same number of steps, known when traced
    over_limit: Any = False  # bool or bool[]: max_steps is less than the length
    checks: list[Check] = field(default_factory=list)
    capacity: int | None = None  # rows of ys, where there are any
    bound_is_loose: bool = False  # the bound is `max_steps`, which may be far above the steps that are taken


def while_extent(max_steps: int | None) -> Extent:
    """The steps of a `while_loop`, whose condition may end it before."""
    high, over = MOST_STEPS if max_steps is None else max_steps, max_steps is not None
    return Extent(0, high, max_steps, fixed=False, over_limit=over, bound_is_loose=True)


def fori_extent(limits: Limits, max_steps: int | None, throw: bool) -> Extent:
    """The steps of a `fori_loop`. One that is going to raise takes none: they could be 2**31."""
    if limits.known:
        return _fixed_extent(limits.caller, limits.known_distance(), max_steps)
    steps, is_more, longest, checks = limits.distance()
    if max_steps is not None:
        over = longest > max_steps and (is_more | (steps > max_steps))
        high = jnp.minimum(steps, max_steps)
        return Extent(0, high, max_steps, False, over_limit=over, checks=checks, bound_is_loose=True)
    if is_more is not False:
        steps = jnp.where(is_more, 0, steps) if throw else steps
        checks = [*checks, Check.of(f"loopax.{limits.caller}", is_more, f"{limits}. {_TOO_FAR}")]
    return Extent(0, steps, None, fixed=False, checks=checks)


_TOO_FAR = (
    f"upper - lower is more than {MOST_STEPS}, to which step counts go. Give closer limits, or use `while_loop`, which "
    "may take more steps."
)


def _fixed_extent(name: str, length: int, max_steps: int | None) -> Extent:
    if length > MOST_STEPS and max_steps is None:
        raise ValueError(f"{name}: {length} steps are more than {MOST_STEPS}, to which step counts go.")
    steps = length if max_steps is None else min(length, max_steps)
    return Extent(0, steps, steps, fixed=steps == length, over_limit=steps < length)


def scan_extent(
    words: Words, length: Any, rows: int | None, max_steps: int | None, reverse: bool, stops: bool, throw: bool
) -> Extent:
    """The steps of a `scan` over `rows` rows of xs (None: no arrays in xs)."""
    if length is None:
        return _scan_without_length(words, rows, max_steps, reverse, stops)
    of_array = is_size(length)
    length = jnp.asarray(length) if of_array else length
    is_array = is_traced_int(f"{words.name}(length=...)", length)
    known = known_int(length)
    if known is not None:
        _check_known_length(words, known, rows)
        if not is_array or (rows is None and max_steps is None):
            return _static_scan(known, rows, max_steps, reverse)
    with width_of(length):
        return _traced_scan(words, length, rows, max_steps, reverse, throw, of_array)


def _check_known_length(words: Words, length: int, rows: int | None) -> None:
    name, xs = words.name, words.xs
    int_within(f"{name}(length=...)", length, 0, MOST_STEPS)
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
    high = MOST_STEPS if max_steps is None else max_steps
    over = max_steps is not None
    return Extent(0, high, max_steps, fixed=False, over_limit=over, capacity=max_steps, bound_is_loose=True)


def _static_scan(length: int, rows: int | None, max_steps: int | None, reverse: bool) -> Extent:
    capacity = length if rows is None else rows
    steps = length if max_steps is None else min(length, max_steps)
    low, high = (length - steps, length) if reverse else (0, steps)
    return Extent(low, high, high, fixed=steps == length, over_limit=steps < length, capacity=capacity)


def _traced_scan(
    words: Words, length: Any, rows: int | None, max_steps: int | None, reverse: bool, throw: bool, of_array: bool
) -> Extent:
    """A length known at run time: it may not be negative, nor beyond the rows of xs, nor beyond what can be counted.

    The size of an array can only be beyond the rows.
    """
    most, top = int(jnp.iinfo(length.dtype).max), MOST_STEPS if rows is None else rows
    negative = not of_array and jnp.issubdtype(length.dtype, jnp.signedinteger) and length < 0
    beyond = most > top and not (of_array and rows is None) and length > top
    checks = []
    if (wrong := negative | beyond) is not False:
        checks = [Check.of(f"loopax.{words.name}", wrong, _length_problem(words, rows), length)]
    length = jnp.clip(length, 0, min(top, most)).astype(jnp.int32)
    if beyond is not False and rows is None and throw:
        length = jnp.where(beyond, 0, length)  # it is going to raise, and should not take 2**31 steps first
    over = max_steps is not None and min(top, most) > max_steps and length > max_steps
    if max_steps is None:
        low, high, bound = 0, length, rows
    elif not reverse:
        low, high, bound = 0, jnp.minimum(length, max_steps), min(top, max_steps)
    elif rows is not None:
        low, high, bound = jnp.maximum(length - max_steps, 0), length, rows
    else:  # without rows of xs, max_steps is the capacity: the last row that there can be is the first walked
        low, high, bound = 0, jnp.minimum(length, max_steps), max_steps
    capacity = rows if rows is not None else max_steps
    return Extent(
        low,
        high,
        bound,
        fixed=False,
        over_limit=over,
        checks=checks,
        capacity=capacity,
        bound_is_loose=rows is None,
    )


def _length_problem(words: Words, rows: int | None) -> str:
    most = f"{words.xs} has {rows} rows" if rows is not None else f"step counts go to {MOST_STEPS}"
    return (
        f"`length`{AMOUNT} is negative, or more than there is ({most}). Give a length within the data, or throw=False "
        "to take what there is."
    )
