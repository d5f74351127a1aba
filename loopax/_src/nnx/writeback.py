"""What a body does to its NNX objects, and the same done to the caller's after the loop."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from loopax._src.core.jaxpr.util import either
from loopax._src.nnx.functional import Frozen, flatten, freeze, freeze_numbered, is_object, roots, thaw
from loopax._src.nnx.paths import differences, is_at_or_below, name_of, places, shown, with_stacked_axis
from loopax._src.pytrees.diff import same_value


@dataclass(frozen=True)
class Changes:
    """What a body does to the NNX objects that it is given, root by root."""

    replaced: tuple[bool, ...] = ()  # it returns an object of its own instead
    written: tuple[tuple[bool, ...], ...] = ()  # which values it changes

    def after(self, before: "Changes") -> "Changes":
        """What a body does to them in this step and in those before it."""
        return replace(self, written=tuple(map(either, self.written, before.written)))


def take_back(where: str, given: Any, objects: list[Any], result: Any, *, of_rows: bool = False) -> tuple[Any, Changes]:
    """What a body returned, frozen, and what it changed; TypeError where that is more than values.

    `given` is the frozen pytree of which the body was given the live `objects`. Rows may lose the name of the axis
    along which they are stacked: their Variables are those of the stack, which keeps it.
    """
    returned, new_objects = freeze_numbered(result)
    if not objects:  # `given` is not looked at then: the body may have used up an `equinox.nn.State` in it
        return returned, Changes()
    old, new = roots(given), roots(returned)
    if list(old) != list(new) or not all(isinstance(root, Frozen) for root in new.values()):
        return returned, Changes()  # containers that differ are found by those who compare containers
    if of_rows:
        returned = _with_stacked_axis(returned, old)
        new = roots(returned)
    before, after = _graphs(old), _graphs(new)
    if not same_value(list(before.values()), list(after.values())):
        raise TypeError(_structure_message(where, differences(before, after)))
    replaced, moved = _replaced(before, objects, new_objects)
    lost = _lost(old, freeze([objects[graph.nodes[0].index] for graph in before.values()]), replaced)
    if moved or lost:
        raise TypeError(_structure_message(where, moved or lost))
    written = tuple(tuple(map(_differ, old[root].values, new[root].values)) for root in old)
    return returned, Changes(replaced, written)


def refuse_changes(where: str, given: Any, objects: list[Any], live: Any, what: str = "xs, whose rows") -> None:
    """Refuse a function that changes the NNX objects that it is given, where nobody would see it."""
    _, changes = take_back(where, given, objects, live, of_rows=True)
    if any(map(any, changes.written)):
        raise TypeError(
            f"{where} changes an NNX object in {what} belong to nobody afterwards. Change a copy, "
            "`loopax.local(module)`, and return what is needed of it."
        )


def refuse_lost_changes(where: str, init: Any, changes: Changes, xs: Any, row_changes: Changes) -> None:
    """Refuse to change a Variable of the caller both in the carry and in rows of xs."""
    in_carry, in_xs = _written(init, changes), _written(xs, row_changes)
    if twice := in_carry.keys() & in_xs.keys():
        raise TypeError(
            f"{where} changes Variables that are both in the carry and in xs, where only one change can be kept:\n"
            + "\n".join(f"  {in_carry[one]} of the carry is {in_xs[one]} of xs" for one in twice)
            + "\nLeave them out of one, or put a copy there, `loopax.local(module)`."
        )


def _written(tree: Any, changes: Changes) -> dict[int, str]:
    """The Variables of the caller that the body changes, by identity, and where they are."""
    if not any(map(any, changes.written)):
        return {}
    numbers = sys.modules["flax.nnx"].graphlib.RefMap()
    found = {}
    for (root, x), replaced, written in zip(roots(tree).items(), changes.replaced, changes.written, strict=True):
        _, paths, leaves = flatten(x, numbers)
        for path, leaf, is_written in zip(paths, leaves, written, strict=True):
            if is_written and not replaced and is_object(leaf):
                found[id(leaf)] = shown(root + name_of(path))
    return found


def _graphs(frozen: Mapping[str, Frozen]) -> dict[str, Any]:
    return {root: x.graph for root, x in frozen.items()}


def _with_stacked_axis(rows: Any, given: Mapping[str, Frozen]) -> Any:
    """Frozen rows with the names of axes that the objects have outside of the loop."""
    stacks = iter(given.values())

    def named(x: Any) -> Any:
        return replace(x, graph=with_stacked_axis(next(stacks).graph, x.graph)) if isinstance(x, Frozen) else x

    return jax.tree.map(named, rows, is_leaf=lambda x: isinstance(x, Frozen))


def _differ(old: Any, new: Any) -> bool:
    """Whether a value is not the one that the body was given (a Variable may hold a pytree)."""
    old, new = jax.tree.leaves(old), jax.tree.leaves(new)
    return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))


def _replaced(graphs: Mapping[str, Any], old: list[Any], new: list[Any]) -> tuple[tuple[bool, ...], list[str]]:
    """Which roots the body replaced by objects of its own, and a line for each part that is replaced, or moved."""
    known = set(map(id, old))
    is_new = [id(x) not in known for x in new]
    replaced = {root: is_new[graph.nodes[0].index] for root, graph in graphs.items()}
    moved = []
    for name, place in places(graphs).items():
        if (number := place.number) is None:
            continue
        root = next(root for root in graphs if is_at_or_below(name, root))
        if is_new[number] != replaced[root] or not (is_new[number] or old[number] is new[number]):
            kind = type(new[number]).__name__
            moved.append(f"  {shown(name)}: got another {kind}, expected the one that was given")
    return tuple(replaced.values()), moved


def _lost(given: Mapping[str, Frozen], left: Sequence[Frozen], replaced: Sequence[bool]) -> list[str]:
    """A line for each change to an object that the body then replaced, which nobody would see."""
    return [
        f"  {shown(root + name_of(path))}: changed, but the object is not returned"
        for (root, start), end, is_replaced in zip(given.items(), left, replaced, strict=True)
        if is_replaced
        for path, a, b in zip(start.paths, start.values, end.values, strict=False)
        if _differ(a, b)
    ]


def _structure_message(where: str, lines: list[str]) -> str:
    return (
        f"{where} must keep the structure and the references of the NNX objects that it is given. "
        "It does not, at:\n" + ("\n".join(lines) or "  attributes that NNX keeps for itself") + "\n"
        "Change the values of Variables in place (`variable[...] = value`) instead of putting others in their place, "
        "add and remove attributes before the loop, and return what is new at each step as a row of `ys`."
    )


def hand_over(where: str, init: Any, last: Any, changes: Changes) -> Any:
    """The result of a loop: the objects of `init`, changed in place to the values of the frozen pytree `last`."""
    if not changes.replaced:
        return last
    objects = list(roots(init).values())
    with clear_errors(f"{where} changes", "after the loop"):
        _write(objects, list(roots(last).values()), changes)
    choices = iter(zip(objects, changes.replaced, strict=True))

    def chosen(leaf: Any) -> Any:
        if not is_object(leaf):
            return leaf
        old, replaced = next(choices)
        return leaf if replaced else old

    leaves, treedef = jax.tree.flatten(thaw(last), is_leaf=is_object)
    return treedef.unflatten(map(chosen, leaves))


def _write(objects: Sequence[Any], last: Sequence[Frozen], changes: Changes) -> None:
    """Give objects the values that have changed, and leave alone what has not: it may belong to an outer trace."""
    nnx = sys.modules["flax.nnx"]
    numbers = nnx.graphlib.RefMap()
    for root, frozen, replaced, written in zip(objects, last, changes.replaced, changes.written, strict=True):
        _, paths, leaves = flatten(root, numbers)
        for path, leaf, value, is_written in zip(paths, leaves, frozen.values, written, strict=True):
            if replaced or not is_written:
                continue
            if isinstance(leaf, nnx.Variable):
                leaf.set_raw_value(value)
            else:
                _set(root, path, value)


def _set(node: Any, path: Sequence[Any], value: Any) -> Any:
    """The node with an array at a path: objects are changed in place, other containers (a tuple) made anew."""
    if not path:
        return value
    key, *rest = path
    kind = sys.modules["flax.nnx"].graphlib.get_node_impl(node)
    old = kind.node_dict(node)[key]
    new = _set(old, rest, value)
    if not is_object(node):
        children, structure = kind.flatten(node)
        return kind.unflatten([(k, new if k == key else child) for k, child in children], structure)
    if new is not old:
        kind.set_key(node, key, new)
    return node


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
