"""What a user knows a traced function and its arguments by, for JAX's errors to name."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import equinox as eqx

from loopax._src.jax_internals import name_in_errors


def code_of(function: Any) -> CodeType | None:
    """The code of a function; of an object that can be called, that of its class. None where it is not Python's."""
    function = _behind(function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def source_of(function: Any) -> str:
    """The name of a function and where it stands, in JAX's words."""
    code = code_of(function)
    if code is None:
        function = _behind(function)
        return getattr(function, "__name__", type(function).__name__)
    return f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}"


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
        sources = " and ".join(map(source_of, self.functions))
        name_in_errors(function, f"loopax.{self.caller}", sources, arguments)
