"""What the three loops repeat: the user's functions as the `call` of a `Step`, also where a loop is durable.

`Options.step_key` gives each step its key.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from loopax._src.frontend.extent import Extent, scan_extent
from loopax._src.frontend.options import (
    Options,
    Words,
    check_callable,
    is_reverse,
    no_rows,
    one_bool,
    pair,
    rows_of,
)
from loopax._src.frontend.trace import StepBack
from loopax._src.jax_internals import to_weak
from loopax._src.nnx.functional import freeze, thaw_numbered
from loopax._src.nnx.writeback import take_back
from loopax._src.pytrees.leaves import Spec, match_carry

# (row, extras, carry, x) -> (carry, a row of ys, whether to go on); None where there is none
Call = Callable[[Any, Sequence[Any], Any, Any], tuple[Any, Any, Any]]


def while_step(options: Options, cond_fun: Any, body_fun: Any) -> tuple[Callable[[Any], Any], Call]:
    """Whether to take a step from a carry, and a step of a `while_loop`."""
    check_callable(f"cond_fun of {options.name}", cond_fun)
    check_callable(f"body_fun of {options.name}", body_fun)

    def goes_on(val: Any) -> Any:
        return one_bool(f"cond_fun of {options.name}", cond_fun(val))

    def call(row: Any, extras: Sequence[Any], val: Any, _: Any) -> tuple[Any, Any, Any]:
        val = body_fun(val, **options.step_key(row, extras))
        return val, None, goes_on(val)

    return goes_on, call


def fori_step(options: Options, body_fun: Any, is_weak: bool) -> Call:
    """A step of a `fori_loop`: the index of the first is the first of `extras`."""
    check_callable(f"body_fun of {options.name}", body_fun)

    def call(row: Any, extras: Sequence[Any], val: Any, _: Any) -> tuple[Any, Any, Any]:
        i = fori_index(row, extras, is_weak)
        return body_fun(i, val, **options.step_key(i, extras)), None, None

    return call


def fori_index(row: Any, extras: Sequence[Any], is_weak: bool) -> Any:
    """The index of a step, from that of the first, which is the first of `extras`."""
    i = extras[0] + row.astype(extras[0].dtype)
    return to_weak(i) if is_weak else i


def step_back(
    options: Options, index: Callable[[Any, Sequence[Any]], Any] | None = None, has_rows: bool = False
) -> StepBack | None:
    """A step back of a loop; None: its kind brings none. `index` gives the first argument of the body, if it has one.

    The kind's functions get what the body gets: an index, carries, a row of xs, a key.
    """
    inverse, record = options.kind.inverse, options.kind.record
    if inverse is None:
        return None
    kind = f"of {options.name}(kind={type(options.kind).__name__}(...))"
    check_callable(f"the inverse {kind}", inverse)

    def call(function: Any, row: Any, extras: Sequence[Any], carries: Sequence[Any], x: Any, *recorded: Any) -> Any:
        i = [] if index is None else [index(row, extras)]
        xs = [x] if has_rows else []
        return function(*i, *carries, *xs, *recorded, **options.step_key(i[0] if i else row, extras))

    if record is None:
        return StepBack(partial(call, inverse))
    check_callable(f"record {kind}", record)
    return StepBack(partial(call, inverse), partial(call, record))


def functions_of_step(options: Options, *functions: Any) -> tuple[Any, ...]:
    """The user's functions in a step, with those of the kind: a step is traced once for the same ones."""
    of_kind = (options.kind.inverse, options.kind.record)
    return (*functions, *(function for function in of_kind if function is not None))


def scan_step(words: Words, options: Options, f: Any, stop: Any, has_rows: bool) -> Call:
    """A step of a scan, which may have rows of outputs or not."""

    def call(row: Any, extras: Sequence[Any], carry: Any, x: Any) -> tuple[Any, Any, Any]:
        carry, y = pair(words, f(carry, x, **options.step_key(row, extras)))
        if not has_rows:
            no_rows(words, freeze(y))
        return carry, y, None if stop is None else ~one_bool(f"stop of {words.name}", stop(carry, y))

    return call


def within_length(call: Call, reverse: bool) -> Call:
    """The step of a scan with `stop` that has no static bound: the length, the first of `extras`, stops it, too."""

    def step(row: Any, extras: Sequence[Any], carry: Any, x: Any) -> tuple[Any, Any, Any]:
        carry, y, goes_on = call(row, extras[1:], carry, x)
        return carry, y, goes_on & (row > 0 if reverse else row + 1 < extras[0])

    return step


def scan_rows(
    words: Words, options: Options, f: Any, stop: Any, xs: Any, length: Any, reverse: Any
) -> tuple[Extent, bool]:
    """Which rows a scan walks, and whether from the last; an error where an argument does not fit."""
    check_callable(words.where, f)
    if stop is not None:
        check_callable(f"stop of {words.name}", stop)
    reverse = is_reverse(words.name, reverse)
    rows = rows_of(words, freeze(xs))
    extent = scan_extent(words, length, rows, options.max_steps, reverse, stop is not None, options.throw)
    return extent, reverse


def always(_: Any) -> Any:
    """Whether to take the first step, where only steps say whether to go on."""
    return jnp.ones((), bool)


def first_condition(where: str, goes_on: Callable[[Any], Any], spec: Spec, arrays: list[Any]) -> tuple[Any, list[Any]]:
    """Whether to take the first step, and the carry after asking: a condition may change NNX objects in it."""
    given = spec.unpack(arrays)
    carry, objects = thaw_numbered(given)
    first = goes_on(carry)
    if not objects:
        return first, arrays
    where = f"cond_fun, which is called before {where},"
    carry, _ = take_back(where, given, objects, carry)
    return first, match_carry(where, given, spec, carry)
