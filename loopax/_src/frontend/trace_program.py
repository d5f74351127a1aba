"""A function of pytrees as a jaxpr."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.tree_util import keystr

from loopax._src.function_names import Called, parameters_of
from loopax._src.jax_internals import ClosedJaxpr
from loopax._src.messages import untraceable_message
from loopax._src.pytrees.leaves import is_static


class TracedProgram(NamedTuple):
    """A traced function."""

    closed: ClosedJaxpr  # arrays -> arrays
    arrays: list[Any]  # among the arguments
    arguments: list[int]  # the number of the positional argument in which each stands; -1: a keyword
    paths: list[Any]  # where in it
    result_of: Callable[[Sequence[Any]], Any]  # what the function returns, from the results of the jaxpr


def trace_program(caller: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedProgram:
    """Trace a function, for a function of loopax; what is not an array in its arguments stays what it is.

    An argument may also hold a `jax.ShapeDtypeStruct` in place of an array.
    """
    given, other = eqx.partition((tuple(args), dict(kwargs)), _is_array)
    leaves, treedef = jax.tree.flatten_with_path(given)
    found: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = eqx.combine(treedef.unflatten(arrays), other)
        results, found["other"] = eqx.partition(fn(*args, **kwargs), _is_array)
        leaves, found["treedef"] = jax.tree.flatten(results)
        return leaves

    arrays = [leaf for _, leaf in leaves]
    Called(caller, (fn,), ()).name_in_errors(flat, [_name(fn, path) for path, _ in leaves])
    try:
        closed = jax.make_jaxpr(flat)(*arrays)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise TypeError(untraceable_message(caller, getattr(fn, "__name__", repr(fn)), error)) from error
    return TracedProgram(
        closed,
        arrays,
        [path[1].idx if path[0].idx == 0 else -1 for path, _ in leaves],
        [path[2:] for path, _ in leaves],
        lambda results: eqx.combine(found["treedef"].unflatten(results), found["other"]),
    )


def _name(fn: Callable[..., Any], path: Any) -> str:
    """What an array among the arguments is called: its parameter, and where in it."""
    (in_keywords, which), rest = path[:2], keystr(path[2:])
    if in_keywords.idx:
        return which.key + rest
    names = parameters_of(fn)
    return (names[which.idx] if which.idx < len(names) else f"argument {which.idx}") + rest


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or (eqx.is_array(leaf) and not is_static(leaf))
