"""The places of NNX objects and what stands there, to say in an error message where two differ."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from loopax._src.pytrees.diff import same_value

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
