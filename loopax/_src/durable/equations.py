"""What an equation of a jaxpr means, in words that stay when JAX or loopax rename theirs.

Left out is what changes no value: names, places in the source, how arrays are spread over devices, how a gradient is
stored, how many steps stand in an iteration.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np

from loopax._src.core.autodiff.sweep_transpose import LinearSweep, linear_sweep_p
from loopax._src.core.batching.compact import CompactVmap, compact_vmap_p
from loopax._src.core.effects import OnlyIf, only_if_p
from loopax._src.core.ir.linear_loop import LinearLoop, linear_loop_p
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.types import retyped_p
from loopax._src.core.masking import ActiveLanes, active_p, always, fill_inactive_p, filled
from loopax._src.core.row_buffers import add_p, get_p, lanes_of, put_p, take_p, view_p
from loopax._src.frontend.raising import written_out
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    Primitive,
    Scan,
    called,
    function_object,
    is_identity,
    is_scan,
    meaningful_params,
    only_shows,
    wide_program,
)

# The Python functions that a program calls while it runs, and what tells two of them apart.
#
# A jaxpr holds such a function as an object. What can be compared is its code: instructions, constants and names,
# also those of functions that it closes over, and of functions of its own module that it calls; and numbers, strings
# and NumPy arrays that are given to it for good, as defaults or by `functools.partial`. What it reads when it is
# called (variables, attributes, files) cannot be: it may rightly be another in each process.


PYTHON = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"  # instructions are of a version
_LIBRARIES = ("jax", "equinox", "loopax")


def fingerprint(callback: Any) -> dict[str, str]:
    """The name of a function, and a checksum of its code (none where it has no Python code)."""
    parts = _parts(callback)
    users = [one for one in parts if isinstance(one, FunctionType) and not _is_of_a_library(one)]
    lines = [line for function in users for line in _code(function.__code__)]
    lines += [line for one in parts if _is_given_values(one) for line in _given(one)]
    name = _name(users[0] if users else callback)
    return {"name": name, "code": sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""}


def _name(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.{name or type(function).__qualname__}"


def _parts(callback: Any) -> list[Any]:
    """A callable and all that it is made of, each once; those of a library are looked through."""
    found: list[Any] = []
    todo = [callback]
    while todo:
        one = todo.pop(0)
        if not any(one is other for other in found):
            found.append(one)
            todo += _within(one)
    return found


def _within(one: Any) -> Iterator[Any]:
    """What a callable is made of."""
    if isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, MethodType):
        yield one.__func__
    elif isinstance(one, FunctionType):
        yield from filter(callable, _closed_over(one))
        if not _is_of_a_library(one):
            yield from _called_by_name(one)
    elif hasattr(one, "callback_func"):  # what JAX makes of the function of `jax.pure_callback`
        yield one.callback_func
    elif hasattr(one, "__wrapped__"):
        yield one.__wrapped__
    elif not isinstance(one, type) and callable(one):
        yield type(one).__call__


def _is_given_values(one: Any) -> bool:
    """Whether it is a function of a user, or a `functools.partial` of one."""
    is_partial = isinstance(one, functools.partial)
    return isinstance(one, FunctionType | functools.partial) and not _is_of_a_library(one.func if is_partial else one)


def _given(one: Any) -> Iterator[str]:
    """The values that are given to a function for good."""
    if isinstance(one, functools.partial):
        values = {**dict(enumerate(one.args)), **one.keywords}
    else:
        values = {**dict(enumerate(one.__defaults__ or ())), **(one.__kwdefaults__ or {})}
    return (f"{name}: {text}" for name, value in values.items() if (text := _text(value)) is not None)


def _text(value: Any) -> str | None:
    """A value that can be compared between processes; None: it cannot."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return f"{value.dtype}{value.shape} {sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, tuple | list):
        texts = [_text(item) for item in value]
        return None if None in texts else f"{type(value).__name__} {texts}"
    return repr(value) if value is None or isinstance(value, bool | int | float | complex | str | bytes) else None


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _called_by_name(function: FunctionType) -> Iterator[Any]:
    """Functions of its own module."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield value


def _is_of_a_library(function: Callable[..., Any]) -> bool:
    return (getattr(function, "__module__", None) or "").split(".")[0] in _LIBRARIES


def _code(code: CodeType) -> Iterator[str]:
    """Instructions, constants and names, without places in the source."""
    yield f"{code.co_code.hex()} {code.co_names} {code.co_freevars} {code.co_argcount} {code.co_flags}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


Program = ClosedJaxpr | Jaxpr


@dataclass(frozen=True)
class Meaning:
    """An operation on arrays: a word, settings and programs in it, each with a word."""

    word: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    programs: Mapping[str, Program] = field(default_factory=dict)


def is_same(eqn: Any) -> bool:
    """Whether the results are the operands."""
    return is_identity(eqn) or eqn.primitive is retyped_p


def is_shown(eqn: Any) -> bool:
    """Whether an equation only shows values to somebody (`jax.debug`)."""
    return only_shows(OnlyIf(**eqn.params).happening if eqn.primitive is only_if_p else eqn.primitive)


def acts(eqn: Any) -> bool:
    """Whether an equation has effects that count, also where nobody uses its results."""
    return any("Debug" not in type(effect).__name__ for effect in eqn.effects)


def program_of(eqn: Any) -> Program | None:
    """The program that an equation evaluates on its operands, if it does nothing else."""
    if eqn.primitive is fill_inactive_p:
        return jax.make_jaxpr(partial(filled, **always(eqn.params)))(*(x.aval for x in eqn.invars))
    return wide_program(eqn) or written_out(eqn) or called(eqn)


def meaning(eqn: Any) -> Meaning:
    """What any other equation does."""
    own = OWN.get(eqn.primitive)
    if own is not None:
        return own(eqn.params)
    if is_scan(eqn):
        return _lax_scan(Scan.of(eqn))
    if (function := function_object(eqn)) is not None:
        return Meaning(type(function).__name__, function.params)
    params = meaningful_params(eqn)
    inner = {name: found for name, value in params.items() if (found := _programs(value))}
    settings = {name: value for name, value in params.items() if name not in inner}
    programs = {f"{name} {i}": program for name, found in inner.items() for i, program in enumerate(found)}
    return Meaning(eqn.primitive.name, settings, programs)


def _programs(value: Any) -> list[Program]:
    values = value if isinstance(value, tuple | list) else [value]
    return [x for x in values if isinstance(x, ClosedJaxpr | Jaxpr)]


def _lax_scan(loop: Scan) -> Meaning:
    settings = {"length": loop.length, "reverse": loop.reverse, "consts": loop.num_consts, "carry": loop.num_carry}
    return Meaning("scan", settings, {"step": loop.body})


# ---- loopax's own


def _loop(loop: Loop, word: str = "loop", **more: Any) -> Meaning:
    settings = {
        "consts": loop.num_consts,
        "carry": loop.num_carry,
        "bound": loop.bound,
        "reverse": loop.reverse,
        "condition": loop.predicated,
        "saved": _places(loop.saved),
    }
    return Meaning(word, settings | more, {"step": loop.body})


def _sweep(sweep: ReverseSweep, word: str = "reverse sweep", **more: Any) -> Meaning:
    settings = {
        "consts": sweep.num_consts,
        "states": sweep.num_state,
        "carry": sweep.num_carry,
        "rows of the forward step": sweep.num_forward_xs,
        "bound": sweep.bound,
        "reverse": sweep.reverse,
    }
    return Meaning(word, settings | more, {"forward step": sweep.forward, "step": sweep.backward})


def _linear_loop(params: dict[str, Any]) -> Meaning:
    linear = LinearLoop(**params)
    return _loop(linear.as_loop, "linear loop", linear=tuple(map(_places, linear.masks)))


def _linear_sweep(params: dict[str, Any]) -> Meaning:
    linear = LinearSweep(**params)
    return _sweep(linear.whole, "linear reverse sweep", linear=tuple(map(_places, linear.masks)))


def _lanes(params: dict[str, Any]) -> Meaning:
    """A batch, by what there is a batch of."""
    compact_vmap = CompactVmap(**params)
    of = _loop(compact_vmap.static) if isinstance(compact_vmap.static, Loop) else _sweep(compact_vmap.static)
    return Meaning(f"lanes of a {of.word}", {**of.settings, "mapped": _places(compact_vmap.mapped)}, of.programs)


def _effect(params: dict[str, Any]) -> Meaning:
    only_if = OnlyIf(**params)
    return Meaning(f"where active: {only_if.happening.name}", dict(only_if.params))


def _places(mask: Sequence[bool]) -> tuple[int, ...]:
    return tuple(i for i, chosen in enumerate(mask) if chosen)


def _plain(word: str, *, lanes: bool = True) -> Callable[[dict[str, Any]], Meaning]:
    """An operation on a buffer."""
    return lambda params: Meaning(word, {"lanes": lanes_of(params)} if lanes else {})


OWN: dict[Primitive, Callable[[dict[str, Any]], Meaning]] = {
    loop_p: lambda params: _loop(Loop(**params)),
    reverse_sweep_p: lambda params: _sweep(ReverseSweep(**params)),
    linear_loop_p: _linear_loop,
    linear_sweep_p: _linear_sweep,
    compact_vmap_p: _lanes,
    only_if_p: _effect,
    active_p: lambda params: Meaning("active lanes", {"limits": _places(ActiveLanes(**params).windows)}),
    get_p: _plain("buffer: get"),
    put_p: _plain("buffer: put"),
    add_p: _plain("buffer: add"),
    take_p: _plain("buffer: take"),
    view_p: _plain("buffer: view", lanes=False),
}
