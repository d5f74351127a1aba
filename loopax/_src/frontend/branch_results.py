"""What the branches of a `cond` or a `switch` return: the same structure and types, or an error that says where not."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.frontend.references import refuse_references_in
from loopax._src.frontend.runtime_checks import collecting
from loopax._src.frontend.trace import without_flags
from loopax._src.jax_internals import to_weak, vary_like, varying_axes, with_varying_axes
from loopax._src.nnx.functional import freeze, thaw
from loopax._src.pytrees.diff import differences, same_value
from loopax._src.pytrees.leaves import Dynamic, Spec, describe, pack


class Branch(NamedTuple):
    """A function, and what the user calls it."""

    name: str
    function: Callable[..., Any]


class Results(NamedTuple):
    """The types that all branches return."""

    spec: Spec
    avals: list[Any]  # of the arrays

    def zeros(self) -> list[Any]:
        """Arrays of these types."""
        return [vary_like(jnp.zeros(aval.shape, aval.dtype), aval) for aval in self.avals]

    def as_returned(self, arrays: Sequence[Any]) -> Any:
        """The user's pytree."""
        arrays = [to_weak(x) if aval.weak_type else x for x, aval in zip(arrays, self.avals, strict=True)]
        return thaw(self.spec.unpack(arrays))


def as_arrays(results: Results, result: Any) -> list[Any]:
    """The arrays of what a branch returns, of the types of all."""
    arrays, _ = pack(without_flags(freeze(result)))
    return [lax.convert_element_type(x, aval.dtype) for x, aval in zip(arrays, results.avals, strict=True)]


def common_results(name: str, branches: Sequence[Branch], operands: tuple[Any, ...]) -> Results:
    """The types that all branches return for these operands."""
    arrays, spec = pack(freeze(operands))
    found = [_result_of(name, branch, spec, arrays) for branch in branches]
    first, tree = found[0]
    avals = first.avals
    for branch, (other, other_tree) in zip(branches[1:], found[1:], strict=True):
        problems = _problems(first, tree, avals, other, other_tree)
        if problems:
            raise TypeError(_message(name, branches[0].name, branch.name, problems))
        avals = [_joined(a, b) for a, b in zip(avals, other.avals, strict=True)]
    return Results(first, avals)


def _result_of(name: str, branch: Branch, spec: Spec, arrays: Sequence[Any]) -> tuple[Spec, Any]:
    """The types that a branch returns, and the pytree with them at its leaves."""
    found: list[Spec] = []

    def call(arrays: Sequence[Any]) -> list[Any]:
        with collecting():
            result = freeze(branch.function(*thaw(spec.unpack(arrays))))
        refuse_references_in(f"{branch.name} of {name} returned", result)
        out, out_spec = pack(without_flags(result))
        found.append(out_spec)
        return out

    jax.make_jaxpr(call)(arrays)
    (of_result,) = found
    leaves = [leaf.aval if isinstance(leaf, Dynamic) else leaf.value for leaf in of_result.leaves]
    return of_result, of_result.treedef.unflatten(leaves)


def _problems(first: Spec, tree: Any, avals: Sequence[Any], other: Spec, other_tree: Any) -> list[str]:
    """Where the results of two branches differ."""
    if first.treedef != other.treedef:
        return [
            line.replace("the carry itself", "the result itself") for line in differences(tree, other_tree, _words)
        ] or [f"{other.treedef} and {first.treedef}"]
    numbered = iter(avals)
    return [
        f"{path}: {_leaf_words(b)} and {_leaf_words(a)}"
        for path, a, b in zip(_paths(first), first.leaves, other.leaves, strict=True)
        if not _fit(a, b, next(numbered) if isinstance(a, Dynamic) else None)
    ]


def _paths(spec: Spec) -> list[str]:
    numbered = spec.treedef.unflatten(range(len(spec.leaves)))
    paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
    return [jax.tree_util.keystr(path) or "the result itself" for path, _ in paths]


def _fit(a: Any, b: Any, aval: Any) -> bool:
    if not (isinstance(a, Dynamic) and isinstance(b, Dynamic)):
        return type(a) is type(b) and same_value(a.value, b.value)
    return a.key_impl == b.key_impl and aval.shape == b.aval.shape and _joined(aval, b.aval) is not None


def _joined(a: Any, b: Any) -> Any:
    """The type of both; None if there is none. A weakly typed result takes the dtype of the other one."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(a, b)
    if any(x.dtype != dtype and not x.weak_type for x in (a, b)):
        return None
    joined = jax.core.ShapedArray(a.shape, dtype, weak_type=a.weak_type and b.weak_type)
    return with_varying_axes(joined, varying_axes(a) | varying_axes(b))


def _words(leaf: Any) -> str:
    return leaf.str_short() if hasattr(leaf, "str_short") else describe(leaf)


def _leaf_words(leaf: Any) -> str:
    return _words(leaf.aval if isinstance(leaf, Dynamic) else leaf.value)


def _message(name: str, first: str, other: str, problems: Sequence[str]) -> str:
    return (
        f"{name}: {other} and {first} must return the same structure, shapes and dtypes. They do not, at:\n"
        + "\n".join(f"  {problem}" for problem in problems)
        + "\nConvert a result (`x.astype(...)`), or return the same containers."
    )
