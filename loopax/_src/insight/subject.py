"""The function that a user asks about: traced, with names for its inputs, and its gradient."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from loopax._src.core.autodiff.jvp import inexact
from loopax._src.core.jaxpr.util import merge_lists, reject, select
from loopax._src.frontend.options import check_callable
from loopax._src.frontend.trace_program import TracedProgram, trace_program
from loopax._src.insight.find_loops import Value
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun
from loopax._src.pytrees.leaves import describe


class Subject(NamedTuple):
    """A function at its arguments."""

    name: str
    args: Sequence[Any]
    program: TracedProgram
    inputs: list[Value]  # the name of each array, and whether a gradient is taken of it

    @property
    def perturbed(self) -> list[bool]:
        """Of which arrays a gradient is taken."""
        return [value.perturbed for value in self.inputs]


def subject(caller: str, fn: Any, args: Sequence[Any], argnums: int | Sequence[int] | None) -> Subject:
    """Trace a function; an error where it is none, or where the arguments do not fit."""
    check_callable(f"fn of {caller}", fn)
    names = _bound_names(caller, fn, args)
    args = [jnp.asarray(arg) if isinstance(arg, float | complex) else arg for arg in args]
    chosen = _chosen(caller, argnums, len(args))
    program = trace_program(caller, fn, args, {})
    floating = inexact(program.closed.in_avals)
    inputs = [
        Value(names[argument] + keystr(path), is_floating and argument in chosen)
        for argument, path, is_floating in zip(program.arguments, program.paths, floating, strict=True)
    ]
    if argnums is not None and not any(value.perturbed for value in inputs):
        raise TypeError(
            f"{caller}(argnums={argnums!r}): there are no floating-point arrays in these arguments, so there is no "
            "gradient. Give the numbers of arguments that hold some."
        )
    return Subject(name_of(fn), args, program, inputs)


def name_of(fn: Callable[..., Any]) -> str:
    """What a function is called."""
    return getattr(fn, "__name__", type(fn).__name__)


def _bound_names(caller: str, fn: Any, args: Sequence[Any]) -> list[str]:
    """The name of the parameter behind each argument."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a built-in function
        return [f"argument {i}" for i in range(len(args))]
    try:
        bound = signature.bind(*args)
    except TypeError as error:
        got = ", ".join(map(describe, args)) or "none"
        raise TypeError(
            f"{caller}({name_of(fn)}, ...): the arguments do not fit: {error}. Got {got}, expected those of "
            f"{name_of(fn)}{signature}. Give what you would call it with; bind keywords with `functools.partial`."
        ) from error
    names: list[str] = []
    for name, value in bound.arguments.items():
        is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{i}]" for i in range(len(value))] if is_rest else [name]
    return names


def _chosen(caller: str, argnums: int | Sequence[int] | None, count: int) -> list[int]:
    if argnums is None:
        return list(range(count))
    numbers: list[Any] = list(argnums) if isinstance(argnums, list | tuple) else [argnums]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise ValueError(
                f"{caller}(argnums=...): got {argnums!r}, expected the number of a positional argument, or several, "
                f"from 0 to {count - 1}."
            )
    return [number % count for number in numbers]


def gradient_of(closed: ClosedJaxpr, perturbed: Sequence[bool]) -> ClosedJaxpr:
    """The program of a gradient: cotangents of the perturbed inputs, for ones as those of the results."""
    function = jaxpr_as_fun(closed)
    floating = inexact(closed.out_avals)

    def gradient(*inputs: Any) -> Any:
        def results(*chosen: Any) -> list[Any]:
            return select(floating, function(*merge_lists(perturbed, reject(perturbed, inputs), chosen)))

        out, pullback = jax.vjp(results, *select(perturbed, inputs))
        return pullback([jnp.ones_like(x) for x in out])

    return jax.make_jaxpr(gradient)(*closed.in_avals)
