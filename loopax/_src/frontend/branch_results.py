"""What the branches of a `cond` or a `switch` return: the same structure and types, or an error that says where not."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.core.jaxpr.util import merge_lists, reject
from loopax._src.frontend.checks import collecting
from loopax._src.frontend.references import refuse_references_in
from loopax._src.frontend.steps import call_user
from loopax._src.frontend.trace import traced_once, without_flags
from loopax._src.jax_internals import (
    Literal,
    convert,
    made_at,
    memory_space,
    open_constants,
    source_here,
    spec_of,
    to_weak,
    varying_axes,
    with_varying_axes,
    zeros,
)
from loopax._src.nnx.functional import freeze, thaw
from loopax._src.pytrees.leaves import NO_RETURN, Dynamic, Spec, conversion, describe, differences, pack, same_structure
from loopax._src.pytrees.static import Called, parameters_of


class Branch(NamedTuple):
    """A function, and what the user calls it."""

    name: str
    function: Callable[..., Any]


_COMPUTED = object()


class BranchResults(NamedTuple):
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
        return list(map(zeros, reject(self.is_given, self.avals)))

    def arrays_of(self, result: Any) -> list[Any]:
        """The arrays that a branch computes, of the types of all."""
        arrays, _ = pack(without_flags(freeze(result)))
        pairs = zip(reject(self.is_given, arrays), reject(self.is_given, self.avals), strict=True)
        return [convert(x, aval.dtype) for x, aval in pairs]

    def as_returned(self, arrays: Sequence[Any]) -> Any:
        """The user's pytree from the arrays that branches compute."""
        given = [x for x in self.given if x is not _COMPUTED]
        arrays = merge_lists(self.is_given, arrays, given)
        arrays = [to_weak(x) if aval.weak_type else x for x, aval in zip(arrays, self.avals, strict=True)]
        return thaw(self.spec.unpack(arrays))


class _Traced(NamedTuple):
    """What one branch returns."""

    spec: Spec
    tree: Any  # the pytree with types at its leaves
    # For each array: where it stands among what the branch closes over and behind it its operands; None: it is computed
    places: list[int | None]
    closed_over: list[Any]


def common_results(name: str, branches: Sequence[Branch], operands: tuple[Any, ...]) -> BranchResults:
    """The types that all branches return for these operands."""
    arrays, spec = pack(freeze(operands))
    key = "branch", spec
    traced = [traced_once((b.function,), key, partial(_trace, name, b, spec, arrays)) for b in branches]
    results = [
        [_COMPUTED if i is None else [*branch.closed_over, *arrays][i] for i in branch.places] for branch in traced
    ]
    first, avals, given = traced[0], traced[0].spec.avals, results[0]
    for branch, other, other_given in zip(branches[1:], traced[1:], results[1:], strict=True):
        names = branches[0].name, branch.name
        if (first.tree is None) != (other.tree is None):
            forgetful, second = names if first.tree is None else names[::-1]
            raise TypeError(f"{forgetful} of {name} must return what {second} does. Got None. {NO_RETURN}")
        if problems := _problems(first, avals, other):
            raise TypeError(
                f"{name}: {names[1]} and {names[0]} must return the same structure, shapes and dtypes. They do not, "
                "at:\n"
                + "\n".join(f"  {problem}" for problem in problems)
                + f"\nConvert a result ({conversion(problems)}), or return the same containers."
            )
        avals = [_joined(a, b) for a, b in zip(avals, other.spec.avals, strict=True)]
        given = [a if a is b else _COMPUTED for a, b in zip(given, other_given, strict=True)]
    # Arrays of `float0`, which no loop carries, have only one value.
    only = [np.zeros(aval.shape, aval.dtype) if aval.dtype == jax.dtypes.float0 else None for aval in avals]
    return BranchResults(first.spec, avals, [x if one is None else one for x, one in zip(given, only, strict=True)])


def _trace(name: str, branch: Branch, spec: Spec, arrays: Sequence[Any]) -> tuple[_Traced, list[Any]]:
    """What a branch returns for operands of these types, and the values that it closes over."""
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

    # What the branch calls the arrays that it is given.
    names = spec.names("operands")
    for i, parameter in enumerate(parameters_of(branch.function)):
        prefix = f"operands[{i}]"
        names = [parameter + name.removeprefix(prefix) if name.startswith(prefix) else name for name in names]
    Called(name, (branch.function,), ()).name_in_errors(call, names)
    closed = jax.make_jaxpr(call)(arrays)
    (of_result,) = found
    leaves = [leaf.aval if isinstance(leaf, Dynamic) else leaf.value for leaf in of_result.leaves]
    opened, consts = open_constants(closed)
    inputs = {var: i for i, var in enumerate(opened.invars)}
    places = [None if isinstance(out, Literal) else inputs.get(out) for out in opened.outvars]
    return _Traced(of_result, of_result.treedef.unflatten(leaves), places, consts), consts


def _problems(first: _Traced, avals: Sequence[Any], other: _Traced) -> list[str]:
    """Where the results of two branches differ; `avals` are the types of the first and those between."""
    a, b = first.spec, other.spec
    if not same_structure(a.treedef, b.treedef):
        found = differences(first.tree, other.tree, root="the result itself")
        return list(found) or [f"{b.treedef} and {a.treedef}"]
    problems, numbered = [], iter(avals)
    for path, x, y in zip(a.paths(), a.leaves, b.leaves, strict=True):
        fits, aval = x == y, next(numbered) if isinstance(x, Dynamic) else None
        if aval is not None and isinstance(x, Dynamic) and isinstance(y, Dynamic):
            same = x.key_impl == y.key_impl and aval.shape == y.aval.shape
            fits = same and _joined(aval, y.aval) is not None
        if not fits:
            words = [describe(leaf.aval if isinstance(leaf, Dynamic) else leaf.value) for leaf in (y, x)]
            problems.append(f"{path or 'the result itself'}: {words[0]} and {words[1]}")
    return problems


def _joined(a: Any, b: Any) -> Any:
    """The type of both; None if there is none. A weakly typed result takes the dtype of the other one."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = a.dtype if a.dtype == b.dtype else jnp.result_type(a, b)
    other_place = memory_space(a) is not memory_space(b) or spec_of(a) != spec_of(b)
    if other_place or any(x.dtype != dtype and not x.weak_type for x in (a, b)):
        return None
    joined = a.update(dtype=dtype, weak_type=a.weak_type and b.weak_type)
    return with_varying_axes(joined, varying_axes(a) | varying_axes(b))
