"""Flax NNX objects to and from pytrees. Inert unless flax is loaded, which is never imported for the user.

NNX objects form a graph: several names may lead to one Variable, and all who hold an object see it change. As the JAX
pytree that an object is too, it loses both. So a loop freezes them before it flattens anything: a `Frozen` node has the
arrays as leaves and everything else, references included, as static structure. Each step thaws objects of its own.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from loopax._src.pytrees.leaves import same_value

# The places of NNX objects and what stands there, to say in an error message where two differ.


DEFAULTS = ("hijax", "ref", "eager_sharding")  # metadata that every Variable has, and that nobody set


class Place(NamedTuple):
    """What stands at a place: an object, an attribute that is no array, an array, or an object met before."""

    content: Any  # equal where nothing has changed
    text: str
    number: int | None  # of an object


def name_of(path: tuple[Any, ...]) -> str:
    """A path in the words of an error message."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def shown(name: str) -> str:
    """The name of a place in a message; that of an object with nothing around it is empty."""
    return name or "the object itself"


def places(graphs: Mapping[str, Any]) -> dict[str, Place]:
    """All places of graph definitions that count their objects together, by name."""
    found: dict[str, Place] = {}
    first: dict[int, str] = {}  # where an object is met first
    for root, graph in graphs.items():
        _visit(root, iter(graph.nodes), iter(graph.attributes), found, first)
    return found


def _visit(
    name: str, nodes: Iterator[Any], attributes: Iterator[Any], found: dict[str, Place], first: dict[int, str]
) -> None:
    """Enter the next node, and what it holds, in the order in which NNX writes a graph definition."""
    graphlib = sys.modules["flax.nnx.graphlib"]
    node = next(nodes)
    if isinstance(node, graphlib.NodeRef):
        found[name] = Place(("again", first[node.index]), f"the object at {shown(first[node.index])}", node.index)
        return
    found[name] = _object(node, graphlib)
    if node.index is not None:
        first[node.index] = name
    for _ in range(getattr(node, "num_attributes", 0)):
        key, content = next(attributes)
        place = name + name_of((key,))
        if isinstance(content, graphlib.NodeAttr):
            _visit(place, nodes, attributes, found, first)
        elif isinstance(content, graphlib.Static):
            found[place] = Place(content, repr(content.value), None)
        else:
            found[place] = Place("array", "an array", None)


def _object(node: Any, graphlib: Any) -> Place:
    """A module, a Variable or a container."""
    if not isinstance(node, graphlib.VariableDef):
        return Place(node.type, node.type.__name__, node.index)
    metadata = dict(node.metadata)
    own = ", ".join(f"{key}={value!r}" for key, value in metadata.items() if key not in DEFAULTS)
    return Place((node.type, metadata), node.type.__name__ + f" ({own})" * bool(own), node.index)


def differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """One line for each place that differs between graph definitions; nothing on what is below such a place."""
    before, after = places(expected), places(got)
    lines: dict[str, str] = {}
    for name in [*before, *(name for name in after if name not in before)]:
        if "._pytree__" in name or any(is_at_or_below(name, other) for other in lines):
            continue
        old, new = before.get(name), after.get(name)
        where = shown(name)
        if new is None and old is not None:
            lines[name] = f"  {where}: {old.text} is missing from the result"
        elif old is None and new is not None:
            lines[name] = f"  {where}: {new.text} is new in the result"
        elif old is not None and new is not None and not same_value(old.content, new.content):
            lines[name] = f"  {where}: got {new.text}, expected {old.text}"
    return list(lines.values())


def with_stacked_axis(stack: Any, row: Any) -> Any:
    """The graph definition of a row with the metadata of the stack, where it only lacks the name of one axis.

    NNX keeps the names of axes as tuples among the metadata (`out_sharding`), and takes them out of rows
    (`nnx.transform_metadata`).
    """
    if len(stack.nodes) != len(row.nodes):
        return row
    return replace(row, nodes=[*map(_with_stacked_axis, stack.nodes, row.nodes)])


def _with_stacked_axis(stack: Any, row: Any) -> Any:
    variable = sys.modules["flax.nnx.graphlib"].VariableDef
    if not (isinstance(stack, variable) and isinstance(row, variable)):
        return row
    whole, less = dict(stack.metadata), dict(row.metadata)
    same_keys = whole.keys() == less.keys()
    fits = same_keys and all(same_value(whole[key], less[key]) or _lacks_one(whole[key], less[key]) for key in whole)
    return replace(row, metadata=stack.metadata) if fits else row


def _lacks_one(whole: Any, less: Any) -> bool:
    """Whether this is the tuple without one of its entries."""
    if not (isinstance(whole, tuple) and isinstance(less, tuple)):
        return False
    return any(less == whole[:i] + whole[i + 1 :] for i in range(len(whole)))


def is_at_or_below(name: str, other: str) -> bool:
    """Whether a place belongs to another."""
    return name.startswith(other) and name[len(other) :][:1] in ("", ".", "[")


@dataclass(frozen=True)
class Attribute:
    """The way from an object to one of its leaves, as the key of a pytree."""

    path: tuple[Any, ...]

    def __str__(self) -> str:
        """As in an error message."""
        return name_of(self.path)


@dataclass(frozen=True)
class Frozen:
    """An NNX object as a pytree. Those of one tree number their objects together, so that they may share some."""

    graph: Any  # the nnx.GraphDef
    paths: tuple[tuple[Any, ...], ...]  # to each value
    values: tuple[Any, ...]  # what Variables hold, and arrays that are attributes


def _flatten(frozen: Frozen) -> tuple[list[tuple[Any, Any]], Any]:
    keyed = [(Attribute(path), value) for path, value in zip(frozen.paths, frozen.values, strict=True)]
    return keyed, (frozen.graph, frozen.paths)


def _unflatten(structure: Any, values: Iterable[Any]) -> Frozen:
    graph, paths = structure
    return Frozen(graph, paths, tuple(values))


jax.tree_util.register_pytree_with_keys(Frozen, _flatten, _unflatten)


def is_object(x: Any) -> bool:
    """Whether this is a module, a Variable, an Rngs, or another node of an NNX graph."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and (type(x) in nnx.graphlib.GRAPH_REGISTRY or isinstance(x, nnx.Variable))


def roots(tree: Any) -> dict[str, Any]:
    """The NNX objects that stand in a pytree, frozen or not, by where they stand."""
    if "flax.nnx" not in sys.modules:
        return {}
    leaves, _ = tree_flatten_with_path(tree, is_leaf=_is_root)
    return {keystr(path): leaf for path, leaf in leaves if _is_root(leaf)}


def _is_root(x: Any) -> bool:
    return isinstance(x, Frozen) or is_object(x)


def freeze(tree: Any) -> Any:
    """Make pytrees of the NNX objects in a pytree."""
    return freeze_numbered(tree)[0]


def freeze_numbered(tree: Any) -> tuple[Any, list[Any]]:
    """A frozen pytree, and all objects in it by number."""
    if "flax.nnx" not in sys.modules:
        return tree, []
    numbers = sys.modules["flax.nnx"].graphlib.RefMap()

    def frozen(x: Any) -> Any:
        if not is_object(x):
            return x
        graph, paths, leaves = flatten(x, numbers)
        return Frozen(graph, paths, tuple(map(_value, leaves)))

    tree = jax.tree.map(frozen, tree, is_leaf=is_object)
    return tree, [found for found, _ in sorted(numbers.items(), key=lambda item: item[1])]


def flatten(root: Any, numbers: Any) -> tuple[Any, tuple[Any, ...], list[Any]]:
    """The graph definition of an object, the paths to its leaves, and these; `numbers` counts objects met so far."""
    graph, state = sys.modules["flax.nnx"].flatten(root, ref_index=numbers, graph=True)
    return graph, state.paths, state.leaves


def _value(leaf: Any) -> Any:
    """What a leaf of a graph holds."""
    if not isinstance(leaf, sys.modules["flax.nnx"].Variable):
        return leaf
    if leaf.ref or leaf.hijax:
        closed_over = " Let the function close over it, or make" if leaf.ref else " Make"
        raise NotImplementedError(
            f"a {type(leaf).__name__} in a carry or in xs is made with `{'ref' if leaf.ref else 'hijax'}=True`, "
            f"expected one without.{closed_over} it without, or convert it: "
            "`nnx.with_vars(module, ref=False, hijax=False)`."
        )
    return leaf.get_raw_value()


def thaw(tree: Any) -> Any:
    """The pytree with new NNX objects, which belong to the current trace."""
    return thaw_numbered(tree)[0]


def thaw_numbered(tree: Any) -> tuple[Any, list[Any]]:
    """The pytree with new NNX objects, and all of them by number."""
    if not roots(tree):
        return tree, []
    nnx = sys.modules["flax.nnx"]
    objects = nnx.graphlib.IndexMap()

    def thawed(x: Any) -> Any:
        if not isinstance(x, Frozen):
            return x
        values = jax.tree.map(lambda value: value, list(x.values))  # a Variable may hold a container, and change it
        return nnx.unflatten(x.graph, values, index_ref=objects)

    tree = jax.tree.map(thawed, tree, is_leaf=lambda x: isinstance(x, Frozen))
    return tree, [found for _, found in sorted(objects.items(), key=lambda item: item[0])]


def keeps_closures(values: Sequence[Any]) -> bool:
    """Whether a function that closes over these arrays closes over them the next time too.

    Where NNX is in use they may be what Variables held when it was traced.
    """
    return not values or "flax.nnx" not in sys.modules
