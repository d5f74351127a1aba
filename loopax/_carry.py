"""Pytrees that go through a loop: which leaves are arrays, and what must stay the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from loopax._compat import AbstractValue, mapped_aval, to_weak, vary_like


@dataclass(frozen=True)
class Static:
    """A leaf that is not an array: it stays what it is, and must not change."""

    value: Any

    def same(self, other: Any) -> bool:
        """Whether a leaf that the body returned is still this value."""
        if self.value is other:
            return True
        if type(self.value) is not type(other):
            return False
        try:
            return bool(self.value == other)
        except Exception:  # noqa: BLE001 - a user's __eq__ may raise anything, and then the values are not known equal
            return False


@dataclass(frozen=True)
class Dynamic:
    """A leaf that is an array in the loop; typed PRNG keys go through as the integers behind them."""

    aval: AbstractValue
    key_impl: Any = None

    def wrap(self, array: jax.Array) -> jax.Array:
        """The user's view of the array."""
        if self.key_impl is None:
            return array
        return jax.random.wrap_key_data(array, impl=self.key_impl)


def is_static(leaf: Any) -> bool:
    """Whether a leaf is not an array and not a number. A Python bool is a flag, not a number."""
    if isinstance(leaf, bool):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        return not (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_)
    return not isinstance(leaf, jax.Array | int | float | complex) and not hasattr(leaf, "__jax_array__")


def to_array(leaf: Any) -> tuple[jax.Array, Dynamic]:
    """A numeric leaf as an array, and its description."""
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(array)
        return data, Dynamic(jax.typeof(data), jax.random.key_impl(array))
    return array, Dynamic(jax.typeof(array))


@dataclass(frozen=True)
class Spec:
    """The structure of a pytree, with a description of each leaf."""

    treedef: Any
    leaves: tuple[Static | Dynamic, ...]

    @property
    def avals(self) -> list[AbstractValue]:
        """The types of the arrays, weak types kept."""
        return [leaf.aval for leaf in self.leaves if isinstance(leaf, Dynamic)]

    def unpack(self, arrays: Sequence[Any]) -> Any:
        """The user's pytree from its arrays."""
        values = iter(arrays)
        leaves = [leaf.value if isinstance(leaf, Static) else leaf.wrap(next(values)) for leaf in self.leaves]
        return self.treedef.unflatten(leaves)

    def rows(self) -> "Spec":
        """The spec of one row, for arrays that are stacked along their first axis."""
        return replace(self, leaves=tuple(_row(leaf) if isinstance(leaf, Dynamic) else leaf for leaf in self.leaves))


def _row(leaf: Dynamic) -> Dynamic:
    return replace(leaf, aval=mapped_aval(leaf.aval.shape[0], 0, leaf.aval))


def pack(tree: Any) -> tuple[list[jax.Array], Spec]:
    """The arrays of a pytree, and its spec."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays, specs = [], []
    for leaf in leaves:
        if is_static(leaf):
            specs.append(Static(leaf))
        else:
            array, spec = to_array(leaf)
            arrays.append(array)
            specs.append(spec)
    return arrays, Spec(treedef, tuple(specs))


def restore_weak(arrays: Sequence[jax.Array], avals: Sequence[AbstractValue]) -> list[jax.Array]:
    """Give results the weak types that the body's results had, and no others."""
    return [
        to_weak(x) if getattr(a, "weak_type", False) else lax.convert_element_type(x, x.dtype)
        for x, a in zip(arrays, avals, strict=True)
    ]


class CarryMismatchError(Exception):
    """Internal: the body's carry does not fit, but it may to another start."""

    def __init__(self, converts: list[Callable[[Any], Any]]) -> None:
        """Keep, for each leaf, the function that converts it. It is called where the trace has ended."""
        super().__init__()
        self.converts = converts


def match_carry(where: str, init: Any, spec: Spec, out: Any) -> list[jax.Array]:
    """The arrays of the carry that a body returned, of the types that `spec` has.

    Raises CarryMismatchError where another start would fit: weak types are promoted as `jax.lax` does, a
    Python bool that becomes an array starts as one, and a start varies over the `shard_map` axes over
    which the result does. Raises TypeError, leaf by leaf, where none would.
    """
    paths_in, paths_out = _by_path(init), _by_path(out)
    if jax.tree.structure(out) != spec.treedef:
        raise TypeError(_structure_message(where, paths_in, paths_out, spec.treedef, jax.tree.structure(out)))
    names, olds, news = list(paths_in), list(paths_in.values()), list(paths_out.values())
    outcomes = [_match_leaf(leaf, old, new) for leaf, old, new in zip(spec.leaves, olds, news, strict=True)]
    problems = [
        f"  {name}: got {describe(new)}, expected {describe(old)}"
        for name, old, new, outcome in zip(names, olds, news, outcomes, strict=True)
        if outcome is None
    ]
    if problems:
        raise TypeError(
            f"{where} must return a carry of the same types as it is given. It does not, at:\n"
            + "\n".join(problems)
            + "\nConvert the initial value or the result (`x.astype(...)`) so that they agree; "
            "what is not an array must be returned as it came."
        )
    if any(isinstance(outcome, _Restart) for outcome in outcomes):
        raise CarryMismatchError([o.convert if isinstance(o, _Restart) else lambda leaf: leaf for o in outcomes])
    return [o for leaf, o in zip(spec.leaves, outcomes, strict=True) if isinstance(leaf, Dynamic)]


@dataclass(frozen=True)
class _Restart:
    """How to convert the start of this leaf."""

    convert: Callable[[Any], Any]


def _match_leaf(spec: Static | Dynamic, old: Any, new: Any) -> Any:
    """The array of a leaf, a `_Restart`, or None where it does not fit. A static leaf gives itself."""
    if isinstance(spec, Static):
        if spec.same(new):
            return spec
        return _Restart(jnp.asarray) if isinstance(old, bool) and _is_bool_scalar(new) else None
    if is_static(new) and not isinstance(new, bool):
        return None
    array, described = to_array(new)
    if described.key_impl != spec.key_impl:
        return None
    a, b = spec.aval, described.aval
    if a.shape != b.shape:
        return None
    if a.dtype != b.dtype:
        return _promoted(a, b, old)
    missing = b.mat.varying - a.mat.varying
    if missing:
        return _Restart(lambda leaf: spec.wrap(vary_like(to_array(leaf)[0], b)))
    return vary_like(array, a)


def _promoted(a: AbstractValue, b: AbstractValue, old: Any) -> Any:
    """A weakly typed start takes the dtype of the result, a weakly typed result that of the start."""
    if getattr(a, "weak_type", False):
        dtype = jnp.result_type(old, jax.ShapeDtypeStruct((), b.dtype))
        return _Restart(lambda leaf: lax.convert_element_type(leaf, dtype)) if dtype != a.dtype else None
    return None


def _is_bool_scalar(x: Any) -> bool:
    return (not is_static(x) and jnp.shape(x) == () and jnp.result_type(x) == jnp.bool_) or isinstance(x, bool)


def _by_path(tree: Any) -> dict[str, Any]:
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path) or "the carry itself": leaf for path, leaf in leaves}


def describe(leaf: Any) -> str:
    """A leaf in the words of an error message."""
    if is_static(leaf):
        return f"{type(leaf).__name__} {leaf!r}"
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        weak = " (weakly typed)" if getattr(leaf, "weak_type", False) else ""
        return f"{leaf.dtype}[{','.join(map(str, jnp.shape(leaf)))}]{weak}"
    return f"{type(leaf).__name__} {leaf!r}"


def _structure_message(where: str, old: dict[str, Any], new: dict[str, Any], treedef: Any, new_treedef: Any) -> str:
    lines = [f"  {path}: {describe(leaf)} is missing from the result" for path, leaf in old.items() if path not in new]
    lines += [f"  {path}: {describe(leaf)} is new in the result" for path, leaf in new.items() if path not in old]
    if not lines:
        lines = [f"  got the structure      {new_treedef}", f"  expected the structure {treedef}"]
    return (
        f"{where} must return a carry of the same structure as it is given. It does not:\n"
        + "\n".join(lines)
        + "\nReturn the same containers, with the same keys and as many elements."
    )
