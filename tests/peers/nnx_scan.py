"""`nnx.scan` in terms of `loopax.scan`, for Flax's tests of it."""

import functools as ft
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.extract import TreeState

import loopax as lx

FLAX_SCAN = nnx.scan
KEPT = "kept"  # the axis of what keeps its changes from step to step without being returned


@dataclass(frozen=True)
class Axes:
    """A tree of axes, each of which holds for a part of another tree: an array, an NNX object, or several of them."""

    treedef: Any
    axes: tuple[Any, ...]

    @property
    def of_rows(self) -> list[int]:
        """The axes of the parts that are rows."""
        return [axis for axis in self.axes if isinstance(axis, int)]

    def split(self, tree: Any) -> dict[str, list[Any]]:
        """The parts of a tree by what they are to the loop."""
        parts: dict[str, list[Any]] = {"carry": [], "kept": [], "broadcast": [], "rows": []}
        for axis, part in zip(self.axes, self.treedef.flatten_up_to(tree), strict=True):
            parts[_role(axis)].append(part)
        return parts

    def join(self, parts: Mapping[str, Sequence[Any]]) -> Any:
        """The tree of these parts."""
        following = {role: iter(some) for role, some in parts.items()}
        return self.treedef.unflatten([next(following[_role(axis)]) for axis in self.axes])


def _role(axis: Any) -> str:
    return "rows" if isinstance(axis, int) else {nnx.Carry: "carry", KEPT: "kept", None: "broadcast"}[axis]


def nnx_scan(
    f: Callable[..., Any] | None = None,
    *,
    in_axes: Any = (nnx.Carry, 0),
    out_axes: Any = (nnx.Carry, 0),
    transform_metadata: Mapping[str, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`nnx.scan`; the `options` are `length`, `reverse` and `unroll`, as `loopax.scan` has them."""
    axes = {"in_axes": in_axes, "out_axes": out_axes, "graph": graph, "graph_updates": graph_updates}
    if f is None:
        return ft.partial(nnx_scan, transform_metadata=transform_metadata, **axes, **options)
    FLAX_SCAN(f, **axes)  # refuses axes without a meaning
    forgets = nnx.set_graph_updates.current_value() if graph_updates is None else graph_updates
    partition = (transform_metadata or {}).get(nnx.PARTITION_NAME)
    outer = _axes(out_axes)
    body_of = ft.cache(lambda inner: _body(f, inner, outer, partition))  # traced once, as NNX does

    @ft.wraps(f)
    def scanned(*args: Any) -> Any:
        inner = _resolved(_axes((in_axes,) if in_axes is nnx.Carry else in_axes), args, None if forgets else KEPT)
        carry = inner.split(args)
        given = list(zip(inner.of_rows, carry.pop("rows"), strict=True))
        rows = [_move(part, axis, 0) for axis, part in given]
        carry, ys = lx.scan(body_of(inner), carry, rows, **options)
        _give_back(given, rows)
        ys = [_move(y, 0, axis) for axis, y in zip(outer.of_rows, ys, strict=True)]
        return outer.join(carry | {"rows": ys})

    return scanned


def _body(f: Callable[..., Any], inner: Axes, outer: Axes, partition: str | None) -> Callable[..., Any]:
    if partition:
        in_axes, out_axes = (axes.treedef.unflatten(axes.axes) for axes in (inner, outer))
        f = nnx.transform_metadata(f, in_axes=in_axes, out_axes=out_axes, partition=partition, graph=False)

    def body(carry: dict[str, Any], rows: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        args = inner.join(carry | {"broadcast": _copy(carry["broadcast"]), "rows": rows})
        out = outer.split(f(*args))
        return carry | {"carry": out["carry"]}, out["rows"]

    return body


def _axes(tree: Any) -> Axes:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None or isinstance(x, TreeState))
    return Axes(treedef, tuple(leaves))


def _resolved(axes: Axes, args: Any, broadcast: str | None) -> Axes:
    """The axes that hold for these arguments; `broadcast` is that of what is broadcast."""
    pairs = zip(axes.axes, axes.treedef.flatten_up_to(args), strict=True)
    found = _axes(axes.treedef.unflatten([_of_variables(axis, part) for axis, part in pairs]))
    return Axes(found.treedef, tuple(broadcast if axis is None else axis for axis in found.axes))


def _of_variables(axis: Any, part: Any) -> Any:
    """The axis of each Variable of an object, where they are given by type and name."""
    if isinstance(axis, nnx.StateAxes):
        given: Any = {which: KEPT if one is nnx.Carry else one for which, one in axis.items()}
    elif isinstance(axis, TreeState):
        given = axis.prefix_fn.value
    else:
        return axis
    return nnx.prefix(part, given, graph=False)


def _copy(broadcast: list[Any]) -> list[Any]:
    """What is broadcast, as each step finds it where NNX updates graphs: what it changes there is lost."""
    return lx.local(broadcast) if _variables(broadcast) else broadcast


def _give_back(given: Sequence[tuple[int, Any]], rows: Sequence[Any]) -> None:
    """Change the caller's Variables as the loop has changed those with their rows in front."""
    for (axis, part), moved in zip(given, rows, strict=True):
        if axis != 0:
            for old, new in zip(_variables(part), _variables(_move(moved, 0, axis)), strict=True):
                old.update_from_state(new)


def _variables(tree: Any) -> list[nnx.Variable]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Variable)]


def _move(tree: Any, start: int, end: int) -> Any:
    return tree if start == end else jax.tree.map(lambda x: jnp.moveaxis(x, start, end), tree)
