"""What the branches of a `cond` or a `switch` return: the same structure and types, or an error that says where not."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from loopax._src.core.jaxpr.util import merge_lists, reject
from loopax._src.frontend.checks import collecting
from loopax._src.frontend.references import refuse_references_in
from loopax._src.frontend.steps import call_user
from loopax._src.frontend.trace import is_only_itself, without_flags
from loopax._src.jax_internals import (
    Literal,
    convert,
    made_at,
    memory_space,
    open_constants,
    source_here,
    spec_of,
    to_weak,
    trace_context,
    varying_axes,
    with_varying_axes,
    zeros,
)
from loopax._src.nnx.functional import freeze, keeps_closures, thaw
from loopax._src.pytrees.leaves import (
    NO_RETURN,
    Dynamic,
    Spec,
    Static,
    conversion,
    describe,
    differences,
    pack,
    same_structure,
)
from loopax._src.pytrees.static import Called, parameters_of


class Branch(NamedTuple):
    """A function, and what the user calls it."""

    name: str
    function: Callable[..., Any]


_COMPUTED = object()


class Results(NamedTuple):
    """The types that all branches return.

    An array that every branch returns as it was given is known without a branch: lanes go on sharing it.
    """

    spec: Spec
    avals: list[Any]  # of the arrays
    given: list[Any]  # for each array, the one that all branches return as it is; `_COMPUTED`: there is none

    @property
    def is_given(self) -> list[bool]:
        """Which arrays are known without a branch."""
        return [x is not _COMPUTED for x in self.given]

    def zeros(self) -> list[Any]:
        """Arrays of these types, for those that branches compute."""
        avals = reject(self.is_given, self.avals)
        return list(map(zeros, avals))

    def as_returned(self, arrays: Sequence[Any]) -> Any:
        """The user's pytree from the arrays that branches compute."""
        given = [x for x in self.given if x is not _COMPUTED]
        arrays = merge_lists(self.is_given, arrays, given)
        arrays = [to_weak(x) if aval.weak_type else x for x, aval in zip(arrays, self.avals, strict=True)]
        return thaw(self.spec.unpack(arrays))


class _Found(NamedTuple):
    """What one branch returns."""

    spec: Spec
    tree: Any  # the pytree with types at its leaves
    given: list[Any]  # as in `Results`


def as_arrays(results: Results, result: Any) -> list[Any]:
    """The arrays that a branch computes, of the types of all."""
    arrays, _ = pack(without_flags(freeze(result)))
    pairs = zip(reject(results.is_given, arrays), reject(results.is_given, results.avals), strict=True)
    return [convert(x, aval.dtype) for x, aval in pairs]


def common_results(name: str, branches: Sequence[Branch], operands: tuple[Any, ...]) -> Results:
    """The types that all branches return for these operands."""
    arrays, spec = pack(freeze(operands))
    found = [_result_of(name, branch, spec, arrays) for branch in branches]
    first = found[0]
    avals, given = first.spec.avals, first.given
    for branch, other in zip(branches[1:], found[1:], strict=True):
        _refuse_one_none(name, {branches[0].name: first.tree, branch.name: other.tree})
        problems = _problems(first, avals, other)
        if problems:
            raise TypeError(_message(name, branches[0].name, branch.name, problems))
        avals = [_joined(a, b) for a, b in zip(avals, other.spec.avals, strict=True)]
        given = [a if a is b else _COMPUTED for a, b in zip(given, other.given, strict=True)]
    return Results(first.spec, avals, [_only_value(aval, x) for aval, x in zip(avals, given, strict=True)])


def _refuse_one_none(name: str, results: dict[str, Any]) -> None:
    """An error where one of two branches returns None."""
    forgetful = [branch for branch, result in results.items() if result is None]
    if len(forgetful) == 1:
        (other,) = results.keys() - forgetful
        raise TypeError(f"{forgetful[0]} of {name} must return what {other} does. Got None. {NO_RETURN}")


def _only_value(aval: Any, given: Any) -> Any:
    """What all branches return of a type: arrays of `float0`, which no loop carries, have only one value."""
    return np.zeros(aval.shape, aval.dtype) if aval.dtype == jax.dtypes.float0 else given


_cache: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()


def _result_of(name: str, branch: Branch, spec: Spec, arrays: Sequence[Any]) -> _Found:
    """What a branch returns for these operands: traced once for the same functions and types, as loops are."""
    function, key = branch.function, (spec, trace_context())
    if not is_only_itself(function):
        return _trace(name, branch, spec, arrays)[0](arrays)
    entries = _cache.setdefault(function, {})
    try:
        if key in entries:
            return entries[key](arrays)
    except TypeError:  # a leaf that is not an array cannot be hashed
        return _trace(name, branch, spec, arrays)[0](arrays)
    found, closed_over = _trace(name, branch, spec, arrays)
    if keeps_closures(closed_over) and not any(isinstance(value, Tracer) for value in closed_over):
        entries[key] = found
    return found(arrays)


def _trace(name: str, branch: Branch, spec: Spec, arrays: Sequence[Any]) -> tuple[Callable[..., _Found], list[Any]]:
    """A function from operands of these types to what a branch returns, and the values that the branch closes over."""
    found: list[Spec] = []
    here = source_here()

    def call(arrays: Sequence[Any]) -> list[Any]:
        with collecting():
            operands = thaw(made_at(here, spec.unpack(arrays)))
            names = [f"operands[{i}]" for i in range(len(operands))]
            result = freeze(call_user(f"{branch.name} of {name}", branch.function, names, *operands))
        refuse_references_in(f"{branch.name} of {name} returned", result)
        out, out_spec = pack(without_flags(result))
        found.append(out_spec)
        return out

    Called(name, (branch.function,), ()).name_in_errors(call, _names(branch, spec))
    closed = jax.make_jaxpr(call)(arrays)
    (of_result,) = found
    leaves = [leaf.aval if isinstance(leaf, Dynamic) else leaf.value for leaf in of_result.leaves]
    tree, (opened, consts) = of_result.treedef.unflatten(leaves), open_constants(closed)
    inputs = {var: i for i, var in enumerate(opened.invars)}
    places = [None if isinstance(out, Literal) else inputs.get(out) for out in opened.outvars]

    def at(arrays: Sequence[Any]) -> _Found:
        values = [*consts, *arrays]
        return _Found(of_result, tree, [_COMPUTED if place is None else values[place] for place in places])

    return at, consts


def _names(branch: Branch, spec: Spec) -> list[str]:
    """What a branch calls the arrays that it is given."""
    names = spec.names("operands")
    for i, parameter in enumerate(parameters_of(branch.function)):
        prefix = f"operands[{i}]"
        names = [parameter + name.removeprefix(prefix) if name.startswith(prefix) else name for name in names]
    return names


def _problems(first: _Found, avals: Sequence[Any], other: _Found) -> list[str]:
    """Where the results of two branches differ."""
    a, b = first.spec, other.spec
    if not same_structure(a.treedef, b.treedef):
        found = differences(first.tree, other.tree, _words, root="the result itself")
        return list(found) or [f"{b.treedef} and {a.treedef}"]
    numbered = iter(avals)
    return [
        f"{path}: {_leaf_words(b)} and {_leaf_words(a)}"
        for path, a, b in zip(_paths(a), a.leaves, b.leaves, strict=True)
        if not _fit(a, b, next(numbered) if isinstance(a, Dynamic) else None)
    ]


def _paths(spec: Spec) -> list[str]:
    numbered = spec.treedef.unflatten(range(len(spec.leaves)))
    paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
    return [jax.tree_util.keystr(path) or "the result itself" for path, _ in paths]


def _fit(a: Static | Dynamic, b: Static | Dynamic, aval: Any) -> bool:
    if not (isinstance(a, Dynamic) and isinstance(b, Dynamic)):
        return a == b
    return a.key_impl == b.key_impl and aval.shape == b.aval.shape and _joined(aval, b.aval) is not None


def _joined(a: Any, b: Any) -> Any:
    """The type of both; None if there is none. A weakly typed result takes the dtype of the other one."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = a.dtype if a.dtype == b.dtype else jnp.result_type(a, b)
    other_place = memory_space(a) is not memory_space(b) or spec_of(a) != spec_of(b)
    if other_place or any(x.dtype != dtype and not x.weak_type for x in (a, b)):
        return None
    joined = a.update(dtype=dtype, weak_type=a.weak_type and b.weak_type)
    return with_varying_axes(joined, varying_axes(a) | varying_axes(b))


def _words(leaf: Any) -> str:
    return leaf.str_short() if hasattr(leaf, "str_short") else describe(leaf)


def _leaf_words(leaf: Any) -> str:
    return _words(leaf.aval if isinstance(leaf, Dynamic) else leaf.value)


def _message(name: str, first: str, other: str, problems: Sequence[str]) -> str:
    return (
        f"{name}: {other} and {first} must return the same structure, shapes and dtypes. They do not, at:\n"
        + "\n".join(f"  {problem}" for problem in problems)
        + f"\nConvert a result ({conversion(problems)}), or return the same containers."
    )
