"""Flax NNX objects to and from pytrees. Inert unless flax is loaded, which is never imported for the user.

NNX objects form a graph: several names may lead to one Variable, and all who hold an object see it change. As the JAX
pytree that an object is too, it loses both. So a loop freezes them before it flattens anything: a `Frozen` node has the
arrays as leaves and everything else, references included, as static structure. Each step thaws objects of its own. What
a body does to them is done to the caller's objects after the loop.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.leaves import describe, same_value


@dataclass(frozen=True)
class Frozen:
    """An NNX object as a pytree. Those of one tree number their objects together, so that they may share some."""

    graph: Any  # the nnx.GraphDef
    paths: tuple[tuple[Any, ...], ...]  # to each value
    values: tuple[Any, ...]  # what Variables hold, and arrays that are attributes


jax.tree_util.register_pytree_with_keys(
    Frozen,
    lambda x: (list(zip(map(name_of, x.paths), x.values, strict=True)), (x.graph, x.paths)),
    lambda structure, values: Frozen(*structure, tuple(values)),
)


# Where a value of a frozen object stands: where the object itself does, and the path from there.
Key = tuple[str, tuple[Any, ...]]


def name_of(path: tuple[Any, ...]) -> str:
    """A path in the words of an error message."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def _text(key: Key) -> str:
    return key[0] + name_of(key[1]) or _ROOT


def is_object(x: Any) -> bool:
    """Whether this is a module, a Variable, an Rngs, or another node of an NNX graph."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and (type(x) in nnx.graphlib.GRAPH_REGISTRY or isinstance(x, nnx.Variable))


def roots(tree: Any) -> dict[str, Any]:
    """The NNX objects that stand in a pytree, frozen or not, by where they stand."""
    if "flax.nnx" not in sys.modules:
        return {}
    is_root = lambda x: isinstance(x, Frozen) or is_object(x)  # noqa: E731
    return {keystr(path): x for path, x in tree_leaves_with_path(tree, is_leaf=is_root) if is_root(x)}


def values_of(frozen: Mapping[str, Frozen]) -> dict[Key, Any]:
    """What frozen objects hold, by its root and its path."""
    return {(root, path): value for root, x in frozen.items() for path, value in zip(x.paths, x.values, strict=True)}


def freeze(tree: Any) -> Any:
    """Make pytrees of the NNX objects in a pytree."""
    return freeze_numbered(tree)[0]


def _raw_value(leaf: Any) -> Any:
    """What a frozen object holds for a Variable, or for an array that is an attribute."""
    if not is_object(leaf):
        return leaf
    if leaf.ref or leaf.hijax:
        closed_over = " Let the function close over it, or make" if leaf.ref else " Make"
        raise NotImplementedError(
            f"a {type(leaf).__name__} in a carry or in xs is made with `{'ref' if leaf.ref else 'hijax'}=True`, "
            f"expected one without.{closed_over} it without, or convert it: "
            "`nnx.with_vars(module, ref=False, hijax=False)`."
        )
    return leaf.get_raw_value()


def freeze_numbered(tree: Any, value: Callable[[Any], Any] = _raw_value) -> tuple[Any, list[Any]]:
    """A frozen pytree, and all objects in it by number."""
    if "flax.nnx" not in sys.modules:
        return tree, []
    nnx = sys.modules["flax.nnx"]
    numbers = nnx.graphlib.RefMap()

    def frozen(x: Any) -> Any:
        if not is_object(x):
            return x
        graph, state = nnx.flatten(x, ref_index=numbers, graph=True)
        return Frozen(graph, state.paths, tuple(map(value, state.leaves)))

    tree = jax.tree.map(frozen, tree, is_leaf=is_object)
    return tree, sorted(numbers, key=lambda found: numbers[found])


def _leaves(tree: Any) -> dict[Key, Any]:
    """The Variables of the objects in a pytree, and arrays that are attributes."""
    return values_of(roots(freeze_numbered(tree, lambda leaf: leaf)[0]))


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
        # A Variable may hold a container, and change it.
        return nnx.unflatten(x.graph, jax.tree.map(lambda value: value, list(x.values)), index_ref=objects)

    tree = jax.tree.map(thawed, tree, is_leaf=lambda x: isinstance(x, Frozen))
    return tree, [objects[number] for number in sorted(objects)]


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


@dataclass(frozen=True)
class Changes:
    """What a body does to the NNX objects that it is given."""

    replaced: frozenset[str] = frozenset()  # the roots in whose places it returns objects of its own
    written: frozenset[Key] = frozenset()  # the values that it changes

    @property
    def handed_over(self) -> frozenset[Key]:
        """The values that change in objects of the caller."""
        return frozenset(key for key in self.written if key[0] not in self.replaced)


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
    before = places(old)
    if not same_value([x.graph for x in old.values()], [x.graph for x in new.values()]):
        hidden = ["  attributes that NNX keeps for itself"] * (not of_rows)
        _refuse_structure(where, differences(before, places(new), of_rows=of_rows) or hidden)

    # Which roots the body replaced by objects of its own, and a line for each part that is replaced, or moved.
    known = set(map(id, objects))
    is_new = [id(x) not in known for x in new_objects]
    first = {root: x.graph.nodes[0].index for root, x in old.items()}  # the number of the object itself
    replaced = frozenset(root for root, number in first.items() if is_new[number])
    moved = [
        f"  {name or _ROOT}: got another {type(new_objects[i]).__name__}, expected the one that was given"
        for name, place in before.items()
        if (i := place.number) is not None
        and (is_new[i] != (place.root in replaced) or not (is_new[i] or objects[i] is new_objects[i]))
    ]
    _refuse_structure(where, moved)

    # Nobody would see a change to an object that the body then replaced.
    start, end = values_of(old), values_of(new)
    left = values_of(dict(zip(first, freeze([objects[number] for number in first.values()]), strict=True)))
    lost = [key for key in start if key[0] in replaced and key in left and _differ(start[key], left[key])]
    _refuse_structure(where, [f"  {_text(key)}: changed, but the object is not returned" for key in lost])
    return returned, Changes(replaced, frozenset(key for key in start if _differ(start[key], end[key])))


def _differ(old: Any, new: Any) -> bool:
    """Whether a value is not the one that the body was given (a Variable may hold a pytree)."""
    old, new = jax.tree.leaves(old), jax.tree.leaves(new)
    return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))


def refuse_changes(where: str, given: Any, objects: list[Any], live: Any, what: str = "xs, whose rows") -> None:
    """Refuse a function that changes the NNX objects that it is given, where nobody would see it."""
    _, changes = take_back(where, given, objects, live, of_rows=True)
    if changes.written:
        raise TypeError(
            f"{where} changes an NNX object in {what} belong to nobody afterwards. Change a copy, "
            "`loopax.local(module)`, and return what is needed of it."
        )


def refuse_lost_changes(where: str, init: Any, changes: Changes, xs: Any, of_rows: Collection[Any]) -> None:
    """Refuse to change a Variable of the caller both in the carry and in rows of xs."""
    if not changes.written or not of_rows:
        return
    in_carry = {id(x): key for key, x in _leaves(init).items() if key in changes.handed_over and is_object(x)}
    in_xs = {id(x): key for key, x in _leaves(xs).items() if key in of_rows}
    if twice := [one for one in in_carry if one in in_xs]:
        raise TypeError(
            f"{where} changes Variables that are both in the carry and in xs, where only one change can be kept:\n"
            + "\n".join(f"  {_text(in_carry[one])} of the carry is {_text(in_xs[one])} of xs" for one in twice)
            + "\nLeave them out of one, or put a copy there, `loopax.local(module)`."
        )


def _refuse_structure(where: str, lines: list[str]) -> None:
    if lines:
        raise TypeError(
            f"{where} must keep the structure and the references of the NNX objects that it is given. "
            "It does not, at:\n" + "\n".join(lines) + "\n"
            "Change the values of Variables in place (`variable[...] = value`) instead of putting others in their "
            "place, add and remove attributes before the loop, and return what is new at each step as a row of `ys`."
        )


def hand_over(where: str, init: Any, last: Any, changes: Changes) -> Any:
    """The result of a loop: the objects of `init`, changed in place to the values of the frozen pytree `last`."""
    if not (frozen := roots(last)):  # `init` is not looked at then: it may hold a used `equinox.nn.State`
        return last
    objects, values = roots(init), values_of(frozen)
    write(where, init, {key: values[key] for key in changes.handed_over})
    given = iter(objects.items())

    def chosen(new: Any) -> Any:
        root, old = next(given) if is_object(new) else (None, new)
        return new if root in changes.replaced else old

    return jax.tree.map(chosen, thaw(last), is_leaf=is_object)


def write(where: str, tree: Any, values: Mapping[Key, Any]) -> None:
    """Change values of NNX objects in place; others are left alone, unlike by `nnx.update`, for outer traces' sake."""
    with clear_errors(f"{where} changes", "after the loop"):
        for key, leaf in _leaves(tree).items():
            if key in values and is_object(leaf):
                leaf.set_raw_value(values[key])
            elif key in values:
                _set(roots(tree)[key[0]], key[1], values[key])


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
        if errors is None or not isinstance(error, errors.TraceContextError) or "loopax.local" in str(error):
            raise
        reason, *_ = str(error).split(" (http")
        raise type(error)(
            f"{where} an NNX object of an outer trace {when} ({reason}). Each step of a loop, and each lane of a "
            "`vmap`, has values of its own, which an object from outside cannot hold. Either put the object into the "
            "carry of the loop, where it may change from step to step (under `jit`, `grad` or `vmap`, it must also be "
            "an argument of the function that is transformed); or put a copy of it into the carry, "
            "`loopax.local(module)`, made where the loop is called, which leaves the object as it is."
        ) from error


# The places of NNX objects and what stands there, to say in an error message where two differ.


class Place(NamedTuple):
    """What stands at a place: an object, an attribute that is no array, an array, an object met before, metadata."""

    root: str
    content: Any  # equal where nothing has changed
    text: str
    number: int | None = None  # of an object


_ROOT = "the object itself"  # the name of an object with nothing around it, which is empty


def places(objects: Mapping[str, Frozen]) -> dict[str, Place]:
    """All places of objects that are numbered together, by name."""
    graphlib = sys.modules["flax.nnx.graphlib"]
    found: dict[str, Place] = {}
    first: dict[int, str] = {}  # where an object is met first

    def visit(root: str, name: str, nodes: Any, attributes: Any) -> None:
        """Enter the next node, and what it holds, in the order in which NNX writes a graph definition."""
        node = next(nodes)
        if isinstance(node, graphlib.NodeRef):
            place = first[node.index]
            found[name] = Place(root, ("again", place), f"the object at {place or _ROOT}", node.index)
            return
        found[name] = Place(root, node.type, node.type.__name__, node.index)
        for key, value in dict(node.metadata).items() if isinstance(node, graphlib.VariableDef) else ():
            found[f"{name}.{key}"] = Place(root, value, repr(value))
        first[node.index] = name
        for _ in range(getattr(node, "num_attributes", 0)):
            key, content = next(attributes)
            place = name + name_of((key,))
            if isinstance(content, graphlib.NodeAttr):
                visit(root, place, nodes, attributes)
            elif isinstance(content, graphlib.Static):
                found[place] = Place(root, content, repr(content.value))
            else:
                found[place] = Place(root, "array", "an array")

    for root, x in objects.items():
        visit(root, root, iter(x.graph.nodes), iter(x.graph.attributes))
    return found


def differences(before: Mapping[str, Place], after: Mapping[str, Place], *, of_rows: bool) -> list[str]:
    """One line for each place that differs; nothing on what is below such a place."""

    def is_same(old: Any, new: Any) -> bool:
        # A row of a Variable may lack the name of one axis of the stack. NNX keeps them as tuples (`out_sharding`).
        shorter = [old[:i] + old[i + 1 :] for i in range(len(old))] if of_rows and isinstance(old, tuple) else []
        return any(same_value(one, new) for one in (old, *shorter))

    lines: dict[str, str] = {}
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        is_below = any(name.startswith((other + ".", other + "[")) for other in lines)
        if "._pytree__" in name or is_below or (old and new and is_same(old.content, new.content)):
            continue
        both = f"got {new.text}, expected {old.text}" if old and new else ""
        one = f"{old.text} is missing from" if old else f"{new.text if new else None} is new in"
        lines[name] = f"  {name or _ROOT}: {both or one + ' the result'}"
    return list(lines.values())
