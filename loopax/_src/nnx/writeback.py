"""What a body does to its NNX objects, and the same done to the caller's after the loop."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path
from jaxtyping import PyTree

from loopax._src.core.jaxpr.util import Mask, either, select
from loopax._src.jax_internals import api_boundary
from loopax._src.nnx.functional import (
    Frozen,
    differences,
    flatten,
    freeze,
    freeze_numbered,
    is_at_or_below,
    is_object,
    name_of,
    places,
    roots,
    shown,
    thaw,
    with_stacked_axis,
)
from loopax._src.pytrees.leaves import CarryMismatchError, Dynamic, Spec, describe, match_carry, pack, same_value

# `local`: a copy of NNX objects, for a loop that changes them.


@api_boundary
def local(module: PyTree[Any]) -> Any:
    """Copy Flax NNX objects, so that a loop changes the copy and not the caller's objects.

    The meaning::

        return copy.deepcopy(module)   # the arrays themselves are shared: they are immutable

    A loop changes the NNX objects in its carry in place. If many lanes share one module, this module cannot hold the
    dropout counters and batch statistics of each lane. `local` gives each lane its own copy::

        def lane(model, x):                                   # jax.vmap(lane, in_axes=(None, 0))
            return lx.fori_loop(0, n, body, (lx.local(model), x))

    Parameters
    ----------
    module
        A module, an `nnx.Rngs`, or any pytree with NNX objects in it. An object that occurs twice occurs twice in the
        copy, as one object.

    Returns
    -------
    copy
        The copy, with new NNX objects that belong to the trace in which `local` is called.

    Raises
    ------
    TypeError
        `module` holds no NNX object. Loops never change other models (Equinox modules, plain pytrees) in place.

    Notes
    -----
    Cost: no array is copied. Derivatives: gradients pass through.

    The copy draws the same random numbers as the original: lanes that share a module share its dropout masks. To give
    each lane its own masks, give each lane an `nnx.Rngs(key)`.

    """
    if not roots(module):
        leaf = describe(module) if jax.tree_util.all_leaves([module]) else f"a {type(module).__name__} without any"
        raise TypeError(
            f"local(module): got {leaf}, expected a Flax NNX object, or a pytree with NNX objects in it. "
            "Only these are changed in place; leave `local` out for other models."
        )
    return thaw(freeze(module))


# What a body writes to NNX objects in rows of xs: further rows of outputs, of which xs is made after the loop.


@dataclass(frozen=True)
class WrittenRows:
    """A row of xs as the body leaves it, and where the arrays of it come from."""

    spec: Spec
    places: tuple[int | None, ...]  # for each array, the one of xs that was there before
    written: Mask  # and whether the body wrote it

    def xs_after(self, xs: Sequence[jax.Array], rows: Sequence[jax.Array], taken: jax.Array) -> Any:
        """The xs, frozen, with the rows that were written where they were taken; others of what is new are zero."""
        following = iter(rows)
        arrays = []
        for place, is_written in zip(self.places, self.written, strict=True):
            old, new = None if place is None else xs[place], next(following) if is_written else None
            arrays.append(old if new is None else new if old is None else _mixed(taken, new, old))
        return self.spec.unpack(arrays)


def _mixed(taken: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(taken.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def written_rows(where: str, start: Any, spec: Spec, end: Any) -> tuple[list[jax.Array], WrittenRows]:
    """The arrays that the body wrote to a row, frozen before and after; a Variable may hold other containers then."""
    old, new = dict(tree_leaves_with_path(start)), dict(tree_leaves_with_path(end))
    numbers = {path: number for number, path in enumerate(_paths_of_arrays(old, spec))}
    ends, end_spec = pack(end)
    paths = _paths_of_arrays(new, end_spec)
    written = tuple(path not in old or new[path] is not old[path] for path in paths)
    after = WrittenRows(end_spec, tuple(map(numbers.get, paths)), written)
    if not any(written):
        return [], after
    fitting = _fitting(where, start, spec, [new.get(path, leaf) for path, leaf in old.items()])
    ends = [x if place is None else fitting[place] for x, place in zip(ends, after.places, strict=True)]
    return select(written, ends), after


def _paths_of_arrays(leaves: dict[Any, Any], spec: Spec) -> list[Any]:
    return [path for path, leaf in zip(leaves, spec.leaves, strict=True) if isinstance(leaf, Dynamic)]


def _fitting(where: str, start: Any, spec: Spec, leaves: Sequence[Any]) -> list[jax.Array]:
    """The arrays of a row with other leaves, of the types that it had."""
    try:
        return match_carry(f"{where}, which changes rows of xs,", start, spec, spec.treedef.unflatten(leaves))
    except CarryMismatchError:
        raise TypeError(
            f"{where} changes an NNX object in a row of xs to another dtype. Convert xs to the dtype before the scan."
        ) from None


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
