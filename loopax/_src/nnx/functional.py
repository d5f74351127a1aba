"""Flax NNX objects to and from pytrees. Inert unless flax is loaded, which is never imported for the user.

NNX objects form a graph: several names may lead to one Variable, and all who hold an object see it change. As the JAX
pytree that an object is too, it loses both. So a loop freezes them before it flattens anything: a `Frozen` node has the
arrays as leaves and everything else, references included, as static structure. Each step thaws objects of its own.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from loopax._src.nnx.paths import name_of


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
