"""What the three loops repeat: the user's functions as the `call` of a `Step`, also where a loop is durable.

`Options.step_key` gives each step its key.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.frontend.extent import Extent, scan_extent
from loopax._src.frontend.options import Options, Words, check_callable, no_capacity, one_bool, pair, rows_of
from loopax._src.frontend.trace import FirstCondition, StepBack
from loopax._src.jax_internals import convert, made_with, to_weak
from loopax._src.nnx.functional import freeze, is_object, take_back, thaw_numbered
from loopax._src.pytrees.leaves import Spec, stays
from loopax._src.pytrees.match_carry import match_carry, refuse_none
from loopax._src.pytrees.static import Why, static_bool

_REVERSE = Why(
    "in which order the program walks the rows",
    "choose between two scans: `jax.lax.cond(flag, lambda: scan(..., reverse=True), lambda: scan(...))`",
)

# (row, extras, carry, x) -> (carry, a row of ys, whether to go on); None where there is none
Call = Callable[[Any, Sequence[Any], Any, Any], tuple[Any, Any, Any]]


def while_step(options: Options, cond_fun: Any, body_fun: Any) -> tuple[FirstCondition, Call]:
    """Whether to take a step from a carry, and a step of a `while_loop`."""
    of_cond, where = f"cond_fun of {options.name}", f"body_fun of {options.name}"
    check_callable(of_cond, cond_fun)
    check_callable(where, body_fun)

    def goes_on(_: Sequence[Any], val: Any) -> Any:
        return one_bool(of_cond, call_user(of_cond, cond_fun, ["val"], val))

    def call(row: Any, extras: Sequence[Any], val: Any, _: Any) -> tuple[Any, Any, Any]:
        new = call_user(where, body_fun, ["val"], val, **options.step_key(row, extras))
        refuse_none(where, val, new)
        return new, None, goes_on(extras, new)

    return goes_on, call


def fori_step(options: Options, body_fun: Any, is_weak: bool) -> Call:
    """A step of a `fori_loop`: the index of the first is the first of `extras`."""
    where = f"body_fun of {options.name}"
    check_callable(where, body_fun)

    def call(row: Any, extras: Sequence[Any], val: Any, _: Any) -> tuple[Any, Any, Any]:
        i = fori_index(row, extras, is_weak)
        new = call_user(where, body_fun, ["i", "val"], i, val, **options.step_key(i, extras))
        refuse_none(where, val, new)
        return new, None, None

    return call


def fori_index(row: Any, extras: Sequence[Any], is_weak: bool) -> Any:
    """The index of a step, from that of the first, which is the first of `extras`."""
    i = extras[0] + convert(row, extras[0].dtype)
    return made_with(extras[0], to_weak(i) if is_weak else i)


def step_back(
    options: Options,
    index: Callable[[Any, Sequence[Any]], Any] | None = None,
    has_rows: bool = False,
    state_of: Callable[[Any], Any] = lambda carry: carry,
    with_state: Callable[[Any, Any], Any] = lambda _, state: state,
) -> StepBack | None:
    """A step back of a loop; None: its kind brings none. `index` gives the first argument of the body, if it has one.

    The kind's functions get what the body gets: an index, carries, a row of xs, a key. Of a carry that holds more than
    the user's state, they get `state_of(carry)`, and `with_state(after, state)` is the carry before a step.
    """
    inverse, record = options.kind.inverse, options.kind.record
    if inverse is None:
        return None
    kind = f"of {options.name}(kind={type(options.kind).__name__}(...))"
    check_callable(f"the inverse {kind}", inverse)
    if record is not None:
        check_callable(f"record {kind}", record)

    def call(function: Any, row: Any, extras: Sequence[Any], carries: Sequence[Any], x: Any, *recorded: Any) -> Any:
        i = [] if index is None else [index(row, extras)]
        xs = [x] if has_rows else []
        key = options.step_key(i[0] if i else row, extras)
        given = ["after"] if len(carries) == 1 else ["before", "after"]
        names = [*["i"] * len(i), *given, *["x"] * len(xs), *["recorded"] * len(recorded)]
        where = f"{'inverse' if function is inverse else 'record'} {kind}"
        return call_user(where, function, names, *i, *map(state_of, carries), *xs, *recorded, **key)

    def before(row: Any, extras: Sequence[Any], carries: Sequence[Any], x: Any, *recorded: Any) -> Any:
        return with_state(carries[0], call(inverse, row, extras, carries, x, *recorded))

    functions = (inverse,) if record is None else (inverse, record)
    return StepBack(functions, before, None if record is None else partial(call, record))


def scan_step(
    words: Words, options: Options, f: Any, stop: Any, has_rows: bool, is_counted: bool = False, reverse: bool = False
) -> Call:
    """A step of a scan, which may have rows of outputs or not.

    `is_counted`: there is a `stop`, and no static bound; the length, the first of `extras`, stops the scan, too.
    """

    def call(row: Any, extras: Sequence[Any], carry: Any, x: Any) -> tuple[Any, Any, Any]:
        key = options.step_key(row, extras)
        carry, y = pair(words, call_user(words.where, f, ["carry", "x"], carry, x, **key))
        if not has_rows and not all(stays(freeze(y))):
            raise no_capacity(words, words.ys, f"return ({words.carry}, None) from {words.f}")
        if stop is None:
            return carry, y, None
        where = f"stop of {words.name}"
        goes_on = ~one_bool(where, call_user(where, stop, ["carry", "y"], carry, y))
        if is_counted:
            goes_on = goes_on & (row > 0 if reverse else row + 1 < extras[0])
        return carry, y, goes_on

    return call


def call_user(where: str, function: Any, names: Sequence[str], *arguments: Any, **keywords: Any) -> Any:
    """What a user's function returns; an error that says how it is called, if it takes other arguments.

    `names` are those of the positional arguments. The function may change containers that it is given: they are copies.
    """
    arguments = jax.tree.map(lambda leaf: leaf, arguments, is_leaf=is_object)
    try:
        return function(*arguments, **keywords)
    except TypeError:
        if (problem := _does_not_fit(function, arguments, keywords)) is None:
            raise
        called = ", ".join([*names, *(f"{name}={name}" for name in keywords)])
        hint = _ABOUT_KEYS["key" in keywords] if "'key'" in problem else ""
        name = where.partition(" of ")[0]
        raise TypeError(f"{where} is called as `{name}({called})`, and does not take that: {problem}.{hint}") from None


_ABOUT_KEYS = {
    True: " With key=, each step gets a key of its own: give the function a parameter `key`, or leave key= out.",
    False: " Steps get keys where the loop is given one, such as key=jax.random.key(0).",
}


def _does_not_fit(function: Any, arguments: Any, keywords: Any) -> str | None:
    """Why a function does not take these arguments; None if it does, or if Python does not know."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        return str(error)
    return None


def scan_rows(words: Words, options: Options, f: Any, stop: Any, xs: Any, length: Any, reverse: Any) -> Extent:
    """Which rows a scan walks; an error where an argument does not fit."""
    check_callable(words.where, f)
    if stop is not None:
        check_callable(f"stop of {words.name}", stop)
    reverse = static_bool(f"{words.name}(reverse=...)", reverse, _REVERSE)
    rows = rows_of(words, freeze(xs))
    return scan_extent(words, length, rows, options.max_steps, reverse, stop is not None, options.throw)


def always(*_: Any) -> Any:
    """Whether to take the first step, where only steps say whether to go on."""
    return jnp.ones((), bool)


def first_condition(
    where: str, goes_on: FirstCondition, extras: Sequence[Any], spec: Spec, arrays: list[Any]
) -> tuple[Any, list[Any]]:
    """Whether to take the first step, and the carry after asking: a condition may change NNX objects in it."""
    given = spec.unpack(arrays)
    carry, objects = thaw_numbered(given)
    first = goes_on(extras, carry)
    if not objects:
        return first, arrays
    where = f"cond_fun, which is called before {where},"
    carry, _ = take_back(where, given, objects, carry)
    return first, match_carry(where, given, spec, carry)
