"""Flax NNX objects to and from pytrees. Inert unless flax is loaded, which is never imported for the user.

NNX objects form a graph: several names may lead to one Variable, and all who hold an object see it change. As the JAX
pytree that an object is too, it loses both. So a loop freezes them before it flattens anything: a `Frozen` node has the
arrays as leaves and everything else, references included, as static structure. Each step thaws objects of its own. What
a body does to them is done to the caller's objects after the loop.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from loopax._src.core.jaxpr.util import Mask, select
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.leaves import Spec, describe, pack, same_value
from loopax._src.pytrees.match_carry import CarryMismatchError, match_carry


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


def name_of(path: tuple[Any, ...]) -> str:
    """A path in the words of an error message."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


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


def freeze(tree: Any) -> Any:
    """Make pytrees of the NNX objects in a pytree."""
    return freeze_numbered(tree)[0]


def freeze_numbered(tree: Any) -> tuple[Any, list[Any]]:
    """A frozen pytree, and all objects in it by number."""
    if "flax.nnx" not in sys.modules:
        return tree, []
    nnx = sys.modules["flax.nnx"]
    numbers = nnx.graphlib.RefMap()

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return leaf
        if leaf.ref or leaf.hijax:
            closed_over = " Let the function close over it, or make" if leaf.ref else " Make"
            raise NotImplementedError(
                f"a {type(leaf).__name__} in a carry or in xs is made with `{'ref' if leaf.ref else 'hijax'}=True`, "
                f"expected one without.{closed_over} it without, or convert it: "
                "`nnx.with_vars(module, ref=False, hijax=False)`."
            )
        return leaf.get_raw_value()

    def frozen(x: Any) -> Any:
        if not is_object(x):
            return x
        graph, state = nnx.flatten(x, ref_index=numbers, graph=True)
        return Frozen(graph, state.paths, tuple(map(value, state.leaves)))

    tree = jax.tree.map(frozen, tree, is_leaf=is_object)
    return tree, sorted(numbers, key=lambda found: numbers[found])


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
class WrittenRows:
    """What a body writes to NNX objects in a row of xs: further rows of outputs, of which xs is made after the loop."""

    spec: Spec  # of the row as the body leaves it
    origins: tuple[int | None, ...]  # for each array, the one of xs that was there before
    written: Mask  # and whether the body wrote it

    def xs_after(self, xs: Sequence[jax.Array], rows: Sequence[jax.Array], taken: jax.Array) -> Any:
        """The xs, frozen, with the rows that were written where they were taken; others of what is new are zero."""
        following = iter(rows)
        arrays = []
        for origin, is_written in zip(self.origins, self.written, strict=True):
            old, new = None if origin is None else xs[origin], next(following) if is_written else None
            if old is not None and new is not None:
                new = jnp.where(taken.reshape(-1, *[1] * (old.ndim - 1)), new, old)
            arrays.append(old if new is None else new)
        return self.spec.unpack(arrays)


def written_rows(where: str, start: Any, spec: Spec, end: Any) -> tuple[list[jax.Array], WrittenRows]:
    """The arrays that the body wrote to a row, frozen before and after; a Variable may hold other containers then."""
    old, new = ({keystr(path): leaf for path, leaf in tree_leaves_with_path(tree)} for tree in (start, end))
    numbers = {path: number for number, path in enumerate(spec.names())}
    ends, end_spec = pack(end)
    paths = end_spec.names()
    written = tuple(path not in old or new[path] is not old[path] for path in paths)
    after = WrittenRows(end_spec, tuple(map(numbers.get, paths)), written)
    if not any(written):
        return [], after
    # Arrays in the places of others have the types of these.
    row = spec.treedef.unflatten([new.get(path, leaf) for path, leaf in old.items()])
    try:
        fitting = match_carry(f"{where}, which changes rows of xs,", start, spec, row)
    except CarryMismatchError:
        raise TypeError(
            f"{where} changes an NNX object in a row of xs to another dtype. Convert xs to the dtype before the scan."
        ) from None
    ends = [x if origin is None else fitting[origin] for x, origin in zip(ends, after.origins, strict=True)]
    return select(written, ends), after


@dataclass(frozen=True)
class Changes:
    """What a body does to the NNX objects that it is given, root by root."""

    replaced: tuple[bool, ...] = ()  # it returns an object of its own instead
    written: tuple[tuple[bool, ...], ...] = ()  # which values it changes


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
        hidden = [] if of_rows else ["  attributes that NNX keeps for itself"]
        _refuse_structure(where, differences(before, places(new), of_rows=of_rows) or hidden)

    # Which roots the body replaced by objects of its own, and a line for each part that is replaced, or moved.
    known = set(map(id, objects))
    is_new = [id(x) not in known for x in new_objects]
    first = {root: x.graph.nodes[0].index for root, x in old.items()}  # the number of the object itself
    replaced = {root: is_new[number] for root, number in first.items()}
    moved = [
        f"  {name or _ROOT}: got another {type(new_objects[i]).__name__}, expected the one that was given"
        for name, place in before.items()
        if (i := place.number) is not None
        and (is_new[i] != replaced[place.root] or not (is_new[i] or objects[i] is new_objects[i]))
    ]
    _refuse_structure(where, moved)

    # Nobody would see a change to an object that the body then replaced.
    left = freeze([objects[number] for number in first.values()])
    lost = [
        f"  {root + name_of(path) or _ROOT}: changed, but the object is not returned"
        for (root, start), end in zip(old.items(), left, strict=True)
        if replaced[root]
        for path, a, b in zip(start.paths, start.values, end.values, strict=False)
        if _differ(a, b)
    ]
    _refuse_structure(where, lost)
    written = tuple(tuple(map(_differ, old[root].values, new[root].values)) for root in old)
    return returned, Changes(tuple(replaced.values()), written)


def _differ(old: Any, new: Any) -> bool:
    """Whether a value is not the one that the body was given (a Variable may hold a pytree)."""
    old, new = jax.tree.leaves(old), jax.tree.leaves(new)
    return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))


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
    if not (any(map(any, changes.written)) and any(map(any, row_changes.written))):
        return
    in_carry, in_xs = (
        {id(x): root + name_of(path) or _ROOT for root, path, x, _ in _written(roots(tree), done) if is_object(x)}
        for tree, done in ((init, changes), (xs, row_changes))
    )
    if twice := in_carry.keys() & in_xs.keys():
        raise TypeError(
            f"{where} changes Variables that are both in the carry and in xs, where only one change can be kept:\n"
            + "\n".join(f"  {in_carry[one]} of the carry is {in_xs[one]} of xs" for one in twice)
            + "\nLeave them out of one, or put a copy there, `loopax.local(module)`."
        )


def _written(objects: Mapping[str, Any], changes: Changes) -> Iterator[tuple[str, Any, Any, int]]:
    """What the body changes of the caller's objects: the root, the path, the leaf and the number of the leaf."""
    numbers = sys.modules["flax.nnx"].graphlib.RefMap()
    for (root, x), replaced, written in zip(objects.items(), changes.replaced, changes.written, strict=True):
        _, state = sys.modules["flax.nnx"].flatten(x, ref_index=numbers, graph=True)
        for number, (path, leaf, is_written) in enumerate(zip(state.paths, state.leaves, written, strict=True)):
            if is_written and not replaced:
                yield root, path, leaf, number


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
    if not changes.replaced:
        return last
    objects, frozen = roots(init), roots(last)
    with clear_errors(f"{where} changes", "after the loop"):
        # What has not changed is left alone, unlike by `nnx.update`: it may belong to an outer trace.
        for root, path, leaf, number in _written(objects, changes):
            value = frozen[root].values[number]
            if is_object(leaf):
                leaf.set_raw_value(value)
            else:
                _set(objects[root], path, value)
    choices = iter(zip(objects.values(), changes.replaced, strict=True))
    leaves, treedef = jax.tree.flatten(thaw(last), is_leaf=is_object)
    for i, leaf in enumerate(leaves):
        if is_object(leaf):
            old, replaced = next(choices)
            leaves[i] = leaf if replaced else old
    return treedef.unflatten(leaves)


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
    """What stands at a place: an object, an attribute that is no array, an array, or an object met before."""

    root: str
    content: Any  # equal where nothing has changed
    text: str
    number: int | None = None  # of an object


_DEFAULTS = ("hijax", "ref", "eager_sharding")  # metadata that every Variable has, and that nobody set
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
        content, text = node.type, node.type.__name__  # a module or a container
        if isinstance(node, graphlib.VariableDef):
            metadata = dict(node.metadata)
            own = ", ".join(f"{key}={value!r}" for key, value in metadata.items() if key not in _DEFAULTS)
            content, text = (node.type, metadata), text + f" ({own})" * bool(own)
        found[name] = Place(root, content, text, node.index)
        if node.index is not None:
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
        if not (of_rows and all(isinstance(x, tuple) and isinstance(x[1], dict) for x in (old, new))):
            return same_value(old, new)
        # A row of a Variable may lack the name of one axis of the stack. NNX keeps them as tuples (`out_sharding`).
        pairs = [(names, new[1].get(key)) for key, names in old[1].items()]
        fits = all(
            same_value(a, b) or (isinstance(a, tuple) and any(b == a[:i] + a[i + 1 :] for i in range(len(a))))
            for a, b in pairs
        )
        return fits and old[0] is new[0] and old[1].keys() == new[1].keys()

    lines: dict[str, str] = {}
    for name in {**before, **after}:
        if "._pytree__" in name or any(name.startswith((other + ".", other + "[")) for other in lines):
            continue
        old, new = before.get(name), after.get(name)
        if new is None and old is not None:
            lines[name] = f"  {name or _ROOT}: {old.text} is missing from the result"
        elif old is None and new is not None:
            lines[name] = f"  {name or _ROOT}: {new.text} is new in the result"
        elif old is not None and new is not None and not is_same(old.content, new.content):
            lines[name] = f"  {name or _ROOT}: got {new.text}, expected {old.text}"
    return list(lines.values())
