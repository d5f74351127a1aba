"""The Python functions that a program calls while it runs, and what tells two of them apart.

A jaxpr holds such a function as an object. What can be compared is its code: instructions, constants and names, also
those of functions that it closes over, and of functions of its own module that it calls; and numbers, strings and NumPy
arrays that are given to it for good, as defaults or by `functools.partial`. What it reads when it is called
(variables, attributes, files) cannot be: it may rightly be another in each process.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

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
