"""Arguments that have to be known when a program is traced, and the errors that say why and what to do."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from operator import index
from types import CodeType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from loopax._src.jax_internals import name_in_errors
from loopax._src.pytrees.leaves import describe

# What a user knows a traced function and its arguments by, for JAX's errors to name.


def code_of(function: Any) -> CodeType | None:
    """The code of a function; of an object that can be called, that of its class. None where it is not Python's."""
    function = _behind(function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def _behind(function: Any) -> Any:
    """What a user has written, behind wrappers and partial applications."""
    function = inspect.unwrap(function)
    while isinstance(function, partial | eqx.Partial):
        function = inspect.unwrap(function.func)
    return function


def parameters_of(function: Any) -> list[str]:
    """The names of its positional parameters, as many as are known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in function
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


class Called(NamedTuple):
    """A user's functions as a function of loopax calls them."""

    caller: str  # that function, such as "while_loop"
    functions: Sequence[Callable[..., Any]]  # the first has these parameters, and others take its results
    parameters: Sequence[str]  # the documentation's names
    extras: Sequence[str] = ("key",)  # what else of the call goes into the arguments

    def name(self, parameter: str) -> str:
        """What the user calls a parameter; the documentation's name where they don't, or it is another's."""
        names = dict(zip(self.parameters, parameters_of(self.functions[0]), strict=False))
        return names.get(parameter, parameter)

    def name_in_errors(self, function: Callable[..., Any], arguments: Sequence[str]) -> None:
        """Let JAX's errors name the user's functions and these arguments while `function` is traced."""
        sources = []
        for user in self.functions:
            code, known = code_of(user), _behind(user)
            name = getattr(known, "__name__", type(known).__name__)
            sources.append(f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}" if code else name)
        name_in_errors(function, f"loopax.{self.caller}", " and ".join(sources), arguments)


class Why(NamedTuple):
    """Why an argument has to be known when a program is traced, and what to do with a value that is not."""

    decides: str  # what follows from it, such as "the shape of the window"
    instead: str  # the way out that leaves the value traced, as a request: "give ..."


def static_int(what: str, value: Any, why: Why, role: str = "") -> int:
    """An integer that is known when the program is traced. `what`: the argument, as `Buffer(capacity=...)`.

    An array outside of `jit` is refused too: the same call in `jit` would be.
    """
    refuse_arrays(what, value, "a Python int", why)
    return an_int(what, value, role)


def positive_int(what: str, value: Any, unit: str, why: Why) -> int:
    """A number of something, from 1 on, that is known when the program is traced."""
    number = static_int(what, value, why, f", the number of {unit}")
    if number < 1:
        raise ValueError(f"{what}: got {number}, expected at least 1, the number of {unit}.")
    return number


def positive_float(what: str, value: Any, or_zero: bool = False) -> float:
    """A positive number that is known when the program is traced."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{what}: got {describe(value)}, expected a Python float.")
    if not value > 0 and not (or_zero and value == 0):
        raise ValueError(f"{what}: got {value}, expected a positive number{' or zero' if or_zero else ''}.")
    return float(value)


def no_choice(what: str, value: Any, is_no: str, by_name: Mapping[str, type], with_arguments: Mapping[str, str]) -> str:
    """What to say of a value that is neither an object nor its name: `kind=5 is not a kind of loop. Choose ...`.

    `by_name` are the classes of objects that have a name. `with_arguments` are lower-case names of others, which have
    none because they need arguments, and how to write these.
    """
    if isinstance(value, type):
        name, has_name = value.__name__, value in by_name.values()
        written = with_arguments.get(name.lower(), f"lx.{name}()" if has_name else f"{name}(...)")
        return f"{what}={name} is a class, and an object is expected: write {what}={written}."
    near = get_close_matches(value.lower(), [*by_name, *with_arguments], 1) if isinstance(value, str) else []
    choices = ", ".join(f"{name!r} ({cls.__name__}())" for name, cls in by_name.items())
    if near and near[0] in with_arguments:
        return f"{what}={value!r} has to be an object, for it needs arguments: write {what}={with_arguments[near[0]]}."
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what}={value!r} is not {is_no}.{meant} Choose one of {choices}."


def code_of_call(name: str, **arguments: Any) -> str:
    """The code that makes an object, without the arguments that are None."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items() if value is not None)})"


def static_bool(what: str, value: Any, why: Why) -> bool:
    """A bool that is known when the program is traced."""
    refuse_tracers(what, value, "a Python bool", why)
    if not is_bool(value):
        raise TypeError(f"{what}: got {describe(value)}, expected True or False.")
    return bool(value)


def is_bool(value: Any) -> bool:
    """Whether this is a bool, of Python or of an array's dtype."""
    is_array = isinstance(value, np.bool_ | np.ndarray | jax.Array)
    return isinstance(value, bool) or (is_array and value.dtype == np.bool_ and value.shape == ())


def refuse_arrays(what: str, value: Any, expected: str, why: Why) -> None:
    """Refuse JAX's arrays, also those whose values are known now."""
    if isinstance(value, jax.Array):
        is_traced = isinstance(value, Tracer)
        got = f"{'a traced ' * is_traced}{describe(value)}"
        static = expected if is_traced else f"{expected}, such as `x.item()`"
        raise TypeError(
            f"{what}: got {got}, expected {expected}. It decides {why.decides}, so it must be known when the program "
            f"is traced. {two_ways(static, why.instead)}"
        )


def refuse_tracers(what: str, value: Any, expected: str, why: Why) -> None:
    """Refuse values that are not known now."""
    if isinstance(value, Tracer):
        refuse_arrays(what, value, expected, why)


def two_ways(static: str, instead: str) -> str:
    """What to do about a value that has to be known when the program is traced; `static`: what it could be."""
    return (
        "Two ways out:\n"
        f"  make it static: {static}, closed over or named in `static_argnames` of `jax.jit` (each value compiles its "
        "own program);\n"
        f"  or {instead}."
    )


def an_int(what: str, value: Any, role: str = "") -> int:
    """The int that a value is, also a scalar of NumPy or a known array; a bool is none."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{what}: got {describe(value)}, expected an int{role}.")


def int_within(what: str, value: Any, low: int, high: int, role: str = "") -> int:
    """An int from `low` to `high`."""
    number = an_int(what, value, role)
    if not low <= number <= high:
        raise ValueError(f"{what}: got {number}, expected an int from {low} to {high}.")
    return number
