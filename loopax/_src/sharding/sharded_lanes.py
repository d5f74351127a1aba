"""Lanes on many devices: `sharded_lanes`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_leaves_with_path

from loopax._src.frontend.options import check_callable
from loopax._src.frontend.run_time_checks import Check, collecting, settle
from loopax._src.jax_internals import api_boundary
from loopax._src.nnx.functional import freeze, refuse_changes, thaw, thaw_numbered
from loopax._src.pytrees.leaves import Spec, Static, describe, is_number, pack, stays, to_array
from loopax._src.sharding.mesh import Devices

_WHERE = "f of sharded_lanes"
NO_ROOM = float("inf")
MOST_WORK = 1e30  # of one lane: sums of it stay below the largest float32


# Where the arguments and results of the mapped function have their lanes: `in_axes` and `out_axes`.


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


# Which device takes which lanes.


class Assignment(NamedTuple):
    """Lanes in places; device d has the places `d * width ... (d + 1) * width - 1`."""

    lanes: Any  # int32[places]: the lane in each place; one of them more than once where devices do not divide them
    places: Any  # int32[lanes]: where the result of each lane stands


def assign_lanes(lanes: int, counts: Any, devices: int) -> Assignment | None:
    """The deal for these counts, or without (None); None where every lane may stay in its place."""
    if counts is not None:
        # An array of NumPy where they are known here.
        known = not isinstance(counts, Tracer) and getattr(counts, "is_fully_addressable", True)
        got, counts = describe(counts), np.asarray(counts) if known else counts
        if not (jnp.issubdtype(counts.dtype, jnp.integer) or jnp.issubdtype(counts.dtype, jnp.floating)):
            raise TypeError(
                f"sharded_lanes(counts=...): got {got}, expected a real number for each lane, such as its number of "
                "steps."
            )
        if counts.shape != (lanes,):
            raise ValueError(
                f"sharded_lanes(counts=...): got {got}, expected shape ({lanes},), a number for each of the {lanes} "
                "lanes."
            )
    if devices == 1 or lanes == 0 or (counts is None and lanes % devices == 0):
        return None
    if counts is None:
        # The first lanes go to the first device, and so on; the last lane also fills what is left.
        places = np.arange(-(-lanes // devices) * devices, dtype=np.int32)
        return Assignment(np.minimum(places, lanes - 1), places[:lanes])
    if not isinstance(counts, np.ndarray):
        return by_work(counts, devices)
    with jax.ensure_compile_time_eval():
        return Assignment(*map(np.asarray, by_work(jnp.asarray(counts), devices)))


def by_work(counts: Any, devices: int) -> Assignment:
    """As many lanes to each device, with sums of counts that are as equal as possible.

    The lane with the most work first, each to the device with the least work among those that have room (Graham 1969).
    Places that are left hold the lane with the least work once more. Any counts give a deal, if perhaps no good one.
    """
    lanes = len(counts)
    width = -(-lanes // devices)  # of each device
    work = jnp.clip(jnp.nan_to_num(lax.stop_gradient(counts).astype(jnp.float32)), 0.0, MOST_WORK)
    numbers = jnp.arange(width * devices, dtype=jnp.int32)
    lane_of = jnp.where(numbers < lanes, numbers, jnp.argmin(work).astype(jnp.int32))
    work = work[lane_of]
    order = jnp.argsort(-work).astype(jnp.int32)

    def give(i: Any, dealing: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        load, held, places = dealing
        device = jnp.argmin(jnp.where(held < width, load, NO_ROOM)).astype(jnp.int32)
        places = places.at[order[i]].set(device * width + held[device])
        return load.at[device].add(work[order[i]]), held.at[device].add(1), places

    # [the work of each device's lanes, how many these are, the places of the lanes that have been dealt]
    start = jnp.zeros(devices, jnp.float32), jnp.zeros(devices, jnp.int32), jnp.zeros_like(order)
    *_, places = lax.fori_loop(0, len(order), give, start)
    return Assignment(jnp.zeros_like(order).at[places].set(lane_of), places[:lanes])


@api_boundary
def sharded_lanes(
    f: Callable[..., Any], mesh: Mesh, axis: str, *, in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """Map a function with loops over lanes that are spread over devices.

    The meaning::

        return jax.vmap(f, in_axes, out_axes)

    Each device runs its own batch with its own numbers of steps, without waiting for other devices until its lanes are
    done. Give `counts` in the call if the work of the lanes is known: lanes are then assigned such that all devices
    have about the same work::

        lanes = lx.sharded_lanes(f, mesh, "lanes")
        ys = lanes(xs, lengths, counts=lengths)

    Parameters
    ----------
    f
        The function: `f(*args)` for one lane, with any loops in it. Values that `f` closes over are the same for all
        lanes.
    mesh
        The mesh of devices.
    axis
        The name of the mesh axis over which lanes are spread. Over the other axes, JAX decides how arrays in `f` are
        sharded.
    in_axes
        The axis of the lanes in each argument, as in `jax.vmap`: an int, or None for an argument that all lanes share.
        Or a tuple with one of these, or a pytree of these, for each argument. Leaves that are not arrays are passed to
        `f` unchanged. The default is 0.
    out_axes
        The axis of the lanes in each result, as in `jax.vmap`, but not None. The default is 0.

    Returns
    -------
    lanes
        A function: `lanes(*args, counts=None)` returns what `jax.vmap` returns, in the same order. `counts` is a number
        for each lane, `(lanes,)`, static or traced: its number of steps, or a number in proportion to its work. Results
        do not depend on `counts`. If the number of devices divides the number of lanes, results are sharded along
        `axis`. Call the function inside `jax.jit`: outside, each call compiles again.

    Raises
    ------
    TypeError
        - `f` is not callable, or changes a Flax NNX object in its arguments.
        - `mesh` is not a mesh.
        - `in_axes` or `out_axes` is not as described above.
        - `counts` are not real numbers.
    ValueError
        - `mesh` has no axis of this name.
        - The arguments have unequal numbers of lanes, or no lanes.
        - `counts` has another shape than `(lanes,)`.

    Notes
    -----
    Communication: devices do not communicate in a loop of `f`. The gradient of values that all lanes share is summed
    over the devices once, after the loops.

    Number of lanes: every device has the same number of lanes. If the number of devices does not divide the number of
    lanes, some devices also run a lane of another device: the lane with the smallest count, or the last lane.

    Assignment by `counts`: lanes are assigned in the order of their work, the largest first (Graham 1969). The
    assignment moves the arguments and results of lanes between devices, once each. A lockstep batch takes as long as
    its longest lane, so use `counts` together with `lanes="compact"`. Static counts cost nothing at run time. Traced
    counts cost a sort, and a short step for each lane.

    Derivatives: forward and reverse mode, in every order.

    """
    check_callable(_WHERE, f)
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"sharded_lanes(mesh=...): got {describe(mesh)}, expected a `jax.sharding.Mesh`. Make one with "
            '`jax.make_mesh((jax.device_count(),), ("lanes",))`.'
        )
    if axis not in mesh.axis_names:
        names = ", ".join(f"{name!r} ({size} devices)" for name, size in mesh.shape.items())
        raise ValueError(f"sharded_lanes(axis=...): got {axis!r}, expected an axis of the mesh. It has {names}.")

    @api_boundary
    def lanes(*args: Any, counts: Any = None) -> Any:
        arguments = lane_arguments(freeze(args), in_axes)
        devices = Devices(mesh, axis).with_shardings_of(arguments.arrays)
        results, checks = _run(f, devices, arguments, counts)
        return thaw(settle(move_lanes(results, out_axes), checks, devices.mesh))

    return lanes


def _run(f: Callable[..., Any], devices: Devices, arguments: Arguments, counts: Any) -> tuple[Any, list[Check]]:
    """Deal the lanes, run them, and put the results, which have lanes first, in order."""
    found: dict[str, Any] = {}

    def lane(*arrays: Any) -> tuple[list[Any], list[Any]]:
        given = arguments.spec.unpack(arrays)
        live, objects = thaw_numbered(given)
        with collecting() as (_, checks, _, _):
            results, found["spec"] = pack(freeze(f(*live)))
        refuse_changes(_WHERE, given, objects, live, "its arguments, whose lanes")
        found["messages"] = [check.text for check in checks]
        return [check.failed for check in checks], results

    each_device = devices.map(jax.vmap(lane, in_axes=arguments.axes), arguments.axes)
    counts = counts if counts is None else devices.known_everywhere(counts)
    dealt = assign_lanes(arguments.lanes, counts, devices.number)

    def program(arrays: list[Any], dealt: Assignment | None) -> tuple[list[Any], list[Any]]:
        if dealt is None:
            flags, results = each_device(*map(devices.spread, arrays, arguments.axes))
        else:
            lanes = [devices.take(x, dealt.lanes, at) for x, at in zip(arrays, arguments.axes, strict=True)]
            flags, results = each_device(*lanes)
            results = [devices.take(y, dealt.places, 0) for y in results]
        return [jnp.any(failed) for failed in flags], results

    failed, results = jax.jit(program)(arguments.arrays, dealt)
    checks = [Check(flag, message) for flag, message in zip(failed, found["messages"], strict=True)]
    return found["spec"].unpack(results), checks
