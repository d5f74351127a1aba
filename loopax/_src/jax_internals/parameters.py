"""What the parameters of an equation are made of, for a comparison of two programs."""

import os
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from jax._src import core as _core
from jax._src import linear_util as _lu

from loopax._src.jax_internals.tracing import JAX_FOLDER, LOOPAX_FOLDER

# A function with derivatives of its own hands JAX its rules in closures, which JAX makes for each call: around the rule
# are functions of JAX, what they are given, and places for what they will find. There is no public way to the rule.
_FOUND_LATER = (_core.Trace, _core.TraceTag, _lu.Store, _lu.EqualStore)


def parts_of_rule(value: Any) -> list[Any] | None:
    """What a closure of JAX's is made of, down to a user's functions; None if it is none. Equal parts, equal rules."""
    if isinstance(value, _lu.WrappedFun):
        return [value.f, value.params, *((function, *_kept(given)) for function, given in value.transforms)]
    if not isinstance(value, FunctionType) or not value.__code__.co_filename.startswith(f"{JAX_FOLDER}{os.sep}"):
        return None
    cells = dict(zip(value.__code__.co_freevars, (x.cell_contents for x in value.__closure__ or ()), strict=True))
    if value.__qualname__ == "_memoize.<locals>.memoized":
        cells = {"fn": cells["fn"]}  # without what it remembers
    return [value.__code__, _kept(cells.values()), value.__defaults__, value.__kwdefaults__]


def _kept(parts: Iterable[Any]) -> list[Any]:
    return [x for x in parts if not isinstance(x, _FOUND_LATER)]


def origin_in_step(eqn: Any) -> tuple[Any, ...]:
    """The name stack of an equation, and the calls of the user's that led to it from the function that was traced last.

    A call is a code object, and the place of an instruction in it: they are compared much faster than lines are found.
    """
    info, calls = eqn.source_info, []
    codes, places = info.traceback.raw_frames() if info.traceback else ([], [])
    for code, place in zip(codes, places, strict=True):
        if code.co_filename.startswith(f"{LOOPAX_FOLDER}{os.sep}"):
            if calls:
                break
        elif not code.co_filename.startswith(f"{JAX_FOLDER}{os.sep}"):
            calls.append((code, place))
    return info.name_stack, tuple(calls)
