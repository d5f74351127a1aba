"""Where the arguments and results of a mapped function have their lanes: `in_axes` and `out_axes`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from loopax._src.pytrees.leaves import Spec, Static, describe, is_number, stays, to_array


@dataclass(frozen=True)
class Arguments:
    """What a function is given for all lanes."""

    arrays: list[jax.Array]
    axes: tuple[int | None, ...]  # where they have their lanes; None: all lanes share the array
    spec: Spec  # from the arrays of one lane to its arguments
    lanes: int


def lane_arguments(args: tuple[Any, ...], in_axes: Any) -> Arguments:
    """Find the lanes in the arguments; errors name the argument and the path in it."""
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    axes = _spread_axes("in_axes", in_axes, args, "the arguments")
    paths = [f"args{keystr(path)}" for path, _ in tree_leaves_with_path(args)]
    arrays, found, specs = [], [], []
    for path, leaf, at, is_kept in zip(paths, jax.tree.leaves(args), axes, stays(args), strict=True):
        if is_kept or (at is None and is_number(leaf)):
            specs.append(Static(leaf))
            continue
        found.append((path, leaf, at if at is None else _in_range("in_axes", path, leaf, at)))
        array, spec = to_array(leaf)
        arrays.append(array)
        specs.append(spec)
    spec = Spec(jax.tree.structure(args), tuple(specs))
    mapped = [(path, leaf, at, jnp.shape(leaf)[at]) for path, leaf, at in found if at is not None]
    if not mapped:
        raise ValueError(
            "sharded_lanes: no argument has lanes. Give at least one array with an axis of lanes, and say in `in_axes` "
            "which axis that is."
        )
    if len({lanes for *_, lanes in mapped}) > 1:
        lines = [f"  {path}: {lanes} lanes at axis {at} ({describe(leaf)})\n" for path, leaf, at, lanes in mapped]
        raise ValueError(
            f"sharded_lanes needs as many lanes in all arguments. Got:\n{''.join(lines)}Give None in `in_axes` for an "
            "argument that all lanes share."
        )
    return Arguments(arrays, tuple(at for *_, at in found), spec, mapped[0][-1])


def move_lanes(results: Any, out_axes: Any) -> Any:
    """Results that have their lanes first, with lanes where `out_axes` says."""
    axes = _spread_axes("out_axes", out_axes, results, "the results")
    leaves, treedef = jax.tree.flatten(results)
    paths = [f"result{keystr(path)}" for path, _ in tree_leaves_with_path(results)]
    moved = [
        leaf if is_kept else jnp.moveaxis(leaf, 0, _in_range("out_axes", path, leaf, at))
        for path, leaf, at, is_kept in zip(paths, leaves, axes, stays(results), strict=True)
    ]
    return treedef.unflatten(moved)


def _in_range(name: str, path: str, leaf: Any, at: int | None) -> int:
    """The axis counted from the front."""
    if at is None:
        raise ValueError(
            f"sharded_lanes({name}=...): got None for {path}, but every result has lanes. Give an int; where all lanes "
            "have the same result, take one of them: `jax.tree.map(lambda y: y[0], ...)`."
        )
    ndim = jnp.ndim(leaf)
    if not -ndim <= at < ndim:
        shared = " Give None where all lanes share it." if name == "in_axes" else ""
        raise ValueError(
            f"sharded_lanes({name}=...): got {at} for {path}, which has {ndim} axes ({describe(leaf)}), so that lanes "
            f"cannot be at axis {at}.{shared}"
        )
    return at % ndim


def _spread_axes(name: str, axes: Any, tree: Any, what: str) -> list[int | None]:
    """The axis for each leaf, from one for each argument, or for parts of it."""
    found: list[int | None] = []

    def spread(at: Any, part: Any) -> None:
        if isinstance(at, bool) or not (at is None or isinstance(at, int)):
            raise TypeError(
                f"sharded_lanes({name}=...): got {describe(at)}, expected an int or None, or a tuple or pytree of "
                "these."
            )
        found.extend([at] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(spread, axes, tree, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(
            f"sharded_lanes({name}=...): got {axes!r}, expected an int, or a structure with an int or None for each "
            f"part of {what}, whose structure is {jax.tree.structure(tree)}. JAX says: {error}"
        ) from None
    return found
