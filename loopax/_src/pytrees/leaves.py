"""Pytrees that go through a loop: which leaves are arrays, and what must stay the same."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.tree_util import FlattenedIndexKey, KeyPath, PyTreeDef, keystr, tree_flatten_with_path
from jaxtyping import Array, Bool, Int, PyTree

from loopax._src.jax_internals import AbstractValue, is_on_host, mapped_aval, of_weak_type, spec_of


class RowByRow(eqx.Module):
    """A part of a pytree whose arrays of rows must be touched by its own operations only."""

    _rows: PyTree[Array]


class LoopInfo(NamedTuple):
    """How a loop ended; returned with `info=True`.

    Attributes
    ----------
    num_steps : int32[]
        The steps that the loop took. A loop without a bound counts up to 2147483647.
    limit_reached : bool[]
        Whether a limit stopped a loop that would have gone on. A limit is `max_steps`, the number of rows, or the
        largest count of steps.
    broken : bool[]
        Whether the loop ended before a step that made a NaN or an infinity. None without `finite=`, as the other two.
    broken_step : int32[]
        Which step that was (the first step is 0); -1 if none.
    broken_leaf : int32[]
        Which leaf of the result was the first with such a number, in the order of `jax.tree.leaves`; -1 if none.

    """

    num_steps: Int[Array, ""]
    limit_reached: Bool[Array, ""]
    broken: Bool[Array, ""] | None = None
    broken_step: Int[Array, ""] | None = None
    broken_leaf: Int[Array, ""] | None = None


# Where two pytrees differ in what is not an array: values that stay what they are, and structures.


def differences(old: Any, new: Any, path: KeyPath = (), *, root: str = "the carry itself") -> Iterator[str]:
    """A line for each place where the structure of `new` is not that of `old`, from the root down."""
    name = keystr(path) or root
    if jax.tree_util.all_leaves([old, new]):
        return
    if type(old) is not type(new):
        yield f"{name}: got {_node_text(new)}, expected {_node_text(old)}"
        return
    (olds, old_structure), (news, new_structure) = _one_level(old), _one_level(new)
    if not same_structure(old_structure, new_structure):
        (_, a), (_, b) = old_structure.node_data(), new_structure.node_data()
        data_line = f"{name}: got {type(new).__name__} with the static data {b!r}, expected {a!r}"
        if any(isinstance(key, FlattenedIndexKey) for key in olds):  # children without names
            yield data_line
            return
        if olds.keys() == news.keys():
            # Static fields differ, or other data of the class.
            children = {keystr((key,)) for key in olds}
            fields = [field.name for field in dataclasses.fields(old)] if dataclasses.is_dataclass(old) else []
            values = [(f".{field}", getattr(old, field, None), getattr(new, field, None)) for field in fields]
            lines = [
                f"{keystr(path)}{field}: got {b!r}, expected {a!r} (a static field)"
                for field, a, b in values
                if field not in children and not same_value(a, b)
            ]
            yield from lines or [data_line]
    for key, child in olds.items():
        if key in news:
            yield from differences(child, news[key], (*path, key))
        else:
            yield f"{keystr((*path, key))}: {_node_text(child)} is missing from the result"
    for key, child in news.items():
        if key not in olds:
            yield f"{keystr((*path, key))}: {_node_text(child)} is new in the result"


def same_value(a: Any, b: Any) -> bool:
    """Whether two values that are not arrays are known to be the same, and no step could tell one from the other.

    Python's `==` knows less: `0.0 == -0.0` and `1 == True`, and NaN is not equal to itself. Numbers may stand anywhere
    in containers.
    """
    try:
        return a is b or (type(a) is type(b) and _same_content(a, b))
    except Exception:  # noqa: BLE001 - a user's __eq__ may raise anything, and then the values are not known equal
        return False


def _same_content(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | np.generic):
        same_type = a.dtype == b.dtype and a.shape == b.shape
        return same_type and (all(map(same_value, a.flat, b.flat)) if a.dtype == object else a.tobytes() == b.tobytes())
    if isinstance(a, Number):
        return repr(a) == repr(b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, PyTreeDef):
        return same_structure(a, b)
    if dataclasses.is_dataclass(a) and not isinstance(a, type) and a.__dataclass_params__.eq:  # pyright: ignore
        fields = [field.name for field in dataclasses.fields(a) if field.compare]
        return all(same_value(getattr(a, name), getattr(b, name)) for name in fields)
    return bool(a == b)


def same_structure(a: Any, b: Any) -> bool:
    """Whether two structures of pytrees have the same containers and the same static data, by `same_value`."""
    data_a, data_b = a.node_data(), b.node_data()
    if data_a is None or data_b is None:  # a leaf
        return data_a is data_b
    children_a, children_b = a.children(), b.children()
    return (
        data_a[0] is data_b[0]
        and len(children_a) == len(children_b)
        and same_value(data_a[1], data_b[1])
        and all(map(same_structure, children_a, children_b))
    )


def _one_level(node: Any) -> tuple[dict[Any, Any], Any]:
    """The children of a node by their keys, and its structure, in which they count as leaves."""
    children, structure = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return {path[0]: child for path, child in children}, structure


def _node_text(node: Any) -> str:
    is_leaf = jax.tree_util.all_leaves([node])
    return "None" if node is None else describe(node) if is_leaf else type(node).__name__


@dataclass(frozen=True, eq=False)
class Static:
    """A leaf that is not an array: it stays what it is, and must not change."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Whether the other is the same for every step: one is traced for 1, 1.0 and True, for 0.0 and -0.0."""
        return isinstance(other, Static) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        """That of the value, but for a number: each NaN has one of its own."""
        return hash(repr(self.value) if isinstance(self.value, Number) else self.value)


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


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number (a bool is none, a scalar of NumPy neither)."""
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic)


def in_modules(tree: Any) -> list[bool]:
    """For each leaf, whether it is a part of an Equinox module."""
    is_module = lambda node: isinstance(node, eqx.Module)  # noqa: E731
    nodes = jax.tree.leaves(tree, is_leaf=is_module)
    return [is_module(node) for node in nodes for _ in jax.tree.leaves(node)]


def stays(tree: Any) -> list[bool]:
    """For each leaf, whether it stays what it is: it is not an array, or a Python number in an Equinox module.

    Such a number is a size or a rate, and Equinox itself takes it for static. Elsewhere it is the start of a count, as
    in `jax.lax`.
    """
    leaves = jax.tree.leaves(tree)
    pairs = zip(leaves, in_modules(tree), strict=True)
    return [is_static(leaf) or (within and is_number(leaf)) for leaf, within in pairs]


def to_array(leaf: Any) -> tuple[jax.Array, Dynamic]:
    """A numeric leaf as an array, and its description."""
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(array)
        return data, Dynamic(jax.typeof(data), jax.random.key_impl(array))
    return array, Dynamic(jax.typeof(array))


@dataclass(frozen=True, eq=False)
class Spec:
    """The structure of a pytree, with a description of each leaf."""

    treedef: Any
    leaves: tuple[Static | Dynamic, ...]

    def __eq__(self, other: object) -> bool:
        """Whether the other describes the same, static data included."""
        return isinstance(other, Spec) and self.leaves == other.leaves and same_structure(self.treedef, other.treedef)

    def __hash__(self) -> int:
        """Of what is equal, the same."""
        return hash((self.treedef, self.leaves))

    @property
    def avals(self) -> list[AbstractValue]:
        """The types of the arrays, weak types kept."""
        return [leaf.aval for leaf in self.leaves if isinstance(leaf, Dynamic)]

    @property
    def numbers(self) -> list[int]:
        """Which of all leaves are the arrays."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Dynamic)]

    def names(self, root: str = "") -> list[str]:
        """The paths of the arrays in the pytree, from its `root` on."""
        return [root + path for path, leaf in zip(self.paths(), self.leaves, strict=True) if isinstance(leaf, Dynamic)]

    def paths(self) -> list[str]:
        """Those of all leaves."""
        numbered = self.treedef.unflatten(range(len(self.leaves)))
        return [keystr(path) for path, _ in tree_flatten_with_path(numbered)[0]]

    def unpack(self, arrays: Sequence[Any]) -> Any:
        """The user's pytree from its arrays."""
        values = iter(arrays)
        leaves = [leaf.value if isinstance(leaf, Static) else leaf.wrap(next(values)) for leaf in self.leaves]
        return self.treedef.unflatten(leaves)

    def rows(self) -> "Spec":
        """The spec of one row, for arrays that are stacked along their first axis."""

        def row(leaf: Static | Dynamic) -> Static | Dynamic:
            is_array = isinstance(leaf, Dynamic)
            return replace(leaf, aval=mapped_aval(leaf.aval.shape[0], 0, leaf.aval)) if is_array else leaf

        return replace(self, leaves=tuple(map(row, self.leaves)))


def pack(tree: Any) -> tuple[list[jax.Array], Spec]:
    """The arrays of a pytree, and its spec."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays, specs = [], []
    for leaf, is_kept in zip(leaves, stays(tree), strict=True):
        if is_kept:
            specs.append(Static(leaf))
        else:
            array, spec = to_array(leaf)
            arrays.append(array)
            specs.append(spec)
    return arrays, Spec(treedef, tuple(specs))


def restore_weak(arrays: Sequence[jax.Array], avals: Sequence[AbstractValue]) -> list[jax.Array]:
    """Give results the weak types that the body's results had, and no others."""
    return list(map(of_weak_type, arrays, avals))


def with_arrays(tree: Any) -> Any:
    """The pytree with arrays for Python numbers."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if is_number(leaf) else leaf, tree)


def describe(leaf: Any) -> str:
    """A leaf, or its type, in the words of an error message."""
    if isinstance(leaf, ShapedArray):
        return leaf.str_short()
    if is_static(leaf) or not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return f"{type(leaf).__name__} {leaf!r}"
    weak = " (weakly typed)" if getattr(leaf, "weak_type", False) else ""
    where = "<host>" if is_on_host(leaf) else ""
    spec = spec_of(jax.typeof(leaf)) if isinstance(leaf, jax.Array) else ()
    spread = f" sharded as {jax.P(*spec)}" if any(spec) else ""
    return f"{leaf.dtype}{where}[{','.join(map(str, jnp.shape(leaf)))}]{weak}{spread}"


def type_in_words(aval: Any) -> str:
    """The dtype and shape of an array, without what is weak and where it is."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def describe_node(node: Any) -> str:
    """A pytree in the words of an error message."""
    if node is None or jax.tree_util.all_leaves([node]):
        return _node_text(node)
    return f"a {type(node).__name__}" + (f" of {len(node)}" if isinstance(node, tuple | list) else "")
