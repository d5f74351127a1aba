"""Flax NNX objects to and from pytrees. Inert unless flax is loaded, which is never imported for the user.

NNX objects form a graph: several names may lead to one Variable, and all who hold an object see it change. As the JAX
pytree that an object is too, it loses both. So a loop freezes them before it flattens anything: a `Frozen` node has the
arrays as leaves and everything else, references included, as static structure. Each step thaws objects of its own,
which the body may change, and what it returns is frozen again. After the last step the caller's objects get the values.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from loopax._nnx_places import differences, is_at_or_below, name_of, places, shown


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


@dataclass(frozen=True)
class Changes:
    """What a body does to the NNX objects in its carry, root by root."""

    replaced: tuple[bool, ...]  # the body returns an object of its own instead
    written: tuple[tuple[bool, ...], ...]  # which values it changes


def is_object(x: Any) -> bool:
    """Whether this is a module, a Variable, an Rngs, or another node of an NNX graph."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and (type(x) in nnx.graphlib.GRAPH_REGISTRY or isinstance(x, nnx.Variable))


def holds_objects(tree: Any) -> bool:
    """Whether there is an NNX object in a pytree, frozen or not."""
    return "flax.nnx" in sys.modules and bool(_roots(tree))


def freeze(tree: Any) -> Any:
    """The same pytree with NNX objects as pytrees."""
    return freeze_numbered(tree)[0]


def freeze_numbered(tree: Any) -> tuple[Any, list[Any]]:
    """A frozen pytree, and all objects in it by number."""
    if "flax.nnx" not in sys.modules:
        return tree, []
    numbers = sys.modules["flax.nnx"].graphlib.RefMap()
    frozen = jax.tree.map(lambda x: _freeze(x, numbers) if is_object(x) else x, tree, is_leaf=is_object)
    return frozen, [found for found, _ in sorted(numbers.items(), key=lambda item: item[1])]


def _freeze(root: Any, numbers: Any) -> Frozen:
    graph, state = sys.modules["flax.nnx"].flatten(root, ref_index=numbers, graph=True)
    return Frozen(graph, state.paths, tuple(map(_value, state.leaves)))


def _value(leaf: Any) -> Any:
    """What a leaf of a graph holds."""
    nnx = sys.modules["flax.nnx"]
    if isinstance(leaf, nnx.Variable):
        if leaf.ref or leaf.hijax:
            raise NotImplementedError(
                f"a {type(leaf).__name__} in a loop is made with `{'ref' if leaf.ref else 'hijax'}=True`: it is a "
                "mutable array of JAX's own, which loopax's loops do not support, since a replay would write to it "
                "again. Make Variables without it, or convert them: `nnx.with_vars(module, ref=False, hijax=False)`."
            )
        return leaf.get_raw_value()
    return leaf


def thaw(tree: Any) -> Any:
    """The pytree with new NNX objects, which belong to the current trace."""
    return thaw_numbered(tree)[0]


def thaw_numbered(tree: Any) -> tuple[Any, list[Any]]:
    """The pytree with new NNX objects, and all of them by number."""
    if not holds_objects(tree):
        return tree, []
    nnx = sys.modules["flax.nnx"]
    objects = nnx.graphlib.IndexMap()

    def thawed(x: Any) -> Any:
        if not isinstance(x, Frozen):
            return x
        values = jax.tree.map(lambda value: value, list(x.values))  # a container is changed in place too
        return nnx.unflatten(x.graph, values, index_ref=objects)

    tree = jax.tree.map(thawed, tree, is_leaf=_is_frozen)
    return tree, [found for _, found in sorted(objects.items(), key=lambda item: item[0])]


def _is_frozen(x: Any) -> bool:
    return isinstance(x, Frozen)


def _roots(tree: Any) -> list[Any]:
    """The NNX objects that stand in a pytree, frozen or not."""
    is_root = lambda x: _is_frozen(x) or is_object(x)  # noqa: E731
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_root) if is_root(leaf)]


def _graphs(frozen: Any) -> dict[str, Any]:
    """The graph definitions in a frozen pytree, by where they stand."""
    leaves, _ = tree_flatten_with_path(frozen, is_leaf=_is_frozen)
    return {keystr(path): leaf.graph for path, leaf in leaves if isinstance(leaf, Frozen)}


def take_back(where: str, given: Any, given_objects: list[Any], carry: Any) -> tuple[Any, Changes]:
    """The carry that a body returned, frozen, and what it changed; TypeError where that is more than values.

    `given` is the frozen carry of which the body was given the objects `given_objects`.
    """
    returned, objects = freeze_numbered(carry)
    if not given_objects:  # and what was given is not looked at: the body may have used up an `equinox.nn.State`
        return returned, Changes((), ())
    before, after = _graphs(given), _graphs(returned)
    if list(before) == list(after) and list(before.values()) != list(after.values()):
        raise TypeError(_structure_message(where, differences(before, after)))
    old, new = _roots(given), _roots(returned)
    if list(before) != list(after) or len(old) != len(new):  # the containers differ, which others will say
        return returned, Changes((), ())
    written = tuple(tuple(map(_differ, a.values, b.values)) for a, b in zip(old, new, strict=True))
    return returned, Changes(_replaced(where, before, given_objects, objects), written)


def _differ(old: Any, new: Any) -> bool:
    """Whether a value is not the one that the body was given (a Variable may hold a pytree)."""
    old, new = jax.tree.leaves(old), jax.tree.leaves(new)
    return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))


def _replaced(where: str, graphs: dict[str, Any], given: list[Any], returned: list[Any]) -> tuple[bool, ...]:
    """Which roots the body replaced by objects of its own. It may not replace a part, or move objects."""
    known = set(map(id, given))
    is_new = [id(x) not in known for x in returned]
    replaced = {root: is_new[graph.nodes[0].index] for root, graph in graphs.items()}
    lines = []
    for name, number in ((name, place.number) for name, place in places(graphs).items() if place.number is not None):
        root = next(root for root in graphs if is_at_or_below(name, root))
        old, new = given[number], returned[number]
        if is_new[number] != replaced[root] or not (is_new[number] or old is new):
            lines.append(f"  {shown(name)}: got another {type(new).__name__}, expected the one that was given")
    if lines:
        raise TypeError(_structure_message(where, lines))
    return tuple(replaced.values())


def _structure_message(where: str, lines: list[str]) -> str:
    return (
        f"{where} must keep the structure and the references of the NNX objects that it is given. "
        "It does not, at:\n" + ("\n".join(lines) or "  attributes that NNX keeps for itself") + "\n"
        "Change the values of Variables in place (`variable[...] = value`) instead of putting others in their place, "
        "add and remove attributes before the loop, and return what is new at each step as a row of `ys`."
    )


def hand_over(where: str, init: Any, last: Any, changes: Changes) -> Any:
    """The result of a loop: the objects of `init`, changed in place to the values of the frozen carry `last`."""
    if not changes.replaced:
        return last
    leaves = jax.tree.leaves(init, is_leaf=is_object)
    new, treedef = jax.tree.flatten(thaw(last), is_leaf=is_object)
    roots = [i for i, leaf in enumerate(new) if is_object(leaf)]
    kept = [i for i, replaced in zip(roots, changes.replaced, strict=True) if not replaced]
    with clear_errors(f"{where} changes", "after the loop"):
        _write([leaves[i] for i in roots], _roots(last), changes)
    for i in kept:
        new[i] = leaves[i]
    return treedef.unflatten(new)


def _write(objects: list[Any], last: list[Frozen], changes: Changes) -> None:
    """Give objects the values that have changed, and leave alone what has not: it may belong to an outer trace."""
    nnx = sys.modules["flax.nnx"]
    numbers = nnx.graphlib.RefMap()
    for root, frozen, replaced, written in zip(objects, last, changes.replaced, changes.written, strict=True):
        _, state = nnx.flatten(root, ref_index=numbers, graph=True)
        for path, leaf, value, is_written in zip(frozen.paths, state.leaves, frozen.values, written, strict=True):
            if replaced or not is_written:
                continue
            if isinstance(leaf, nnx.Variable):
                leaf.set_raw_value(value)
            else:
                nnx.update(root, nnx.from_flat_state([(path, value)]))


def keeps_closures(values: Sequence[Any]) -> bool:
    """Whether a function that closes over these arrays closes over them the next time too.

    Where NNX is in use they may be what Variables held when it was traced.
    """
    return not values or "flax.nnx" not in sys.modules


@contextmanager
def clear_errors(where: str, when: str = "in the body of the loop") -> Iterator[None]:
    """Say what to do where NNX refuses to change an object of an outer trace."""
    try:
        yield
    except Exception as error:
        errors = sys.modules.get("flax.errors")
        is_refused = errors is not None and isinstance(error, errors.TraceContextError)
        if not is_refused or "loopax.local" in str(error):
            raise
        raise type(error)(_outer_message(where, when, str(error))) from error


def _outer_message(where: str, when: str, refused: str) -> str:
    reason, *_ = refused.split(" (http")
    return (
        f"{where} an NNX object of an outer trace {when} ({reason}). Each step of a loop, and each lane of a `vmap`, "
        "has values of its own, which an object from outside cannot hold. Either put the object into the carry of the "
        "loop, where it may change from step to step (under `jit`, `grad` or `vmap`, it must also be an argument of "
        "the function that is transformed); or put a copy of it into the carry, `loopax.local(module)`, made where the "
        "loop is called, which leaves the object as it is."
    )
