"""Lanes on many devices: `sharded_lanes`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh

from loopax._src.frontend.checks import Check, collecting, settle
from loopax._src.frontend.options import check_callable
from loopax._src.jax_internals import api_boundary
from loopax._src.nnx.functional import freeze, refuse_changes, thaw, thaw_numbered
from loopax._src.pytrees.leaves import describe, pack
from loopax._src.sharding.in_axes import Arguments, lane_arguments, move_lanes
from loopax._src.sharding.mesh import Devices

_WHERE = "f of sharded_lanes"
NO_ROOM = float("inf")
MOST_WORK = 1e30  # of one lane: sums of it stay below the largest float32


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
        with collecting() as (checks, _):
            results, found["spec"] = pack(freeze(f(*live)))
        refuse_changes(_WHERE, given, objects, live, "its arguments, whose lanes")
        found["messages"] = [check.message for check in checks]
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
