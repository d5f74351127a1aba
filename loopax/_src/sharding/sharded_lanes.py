"""Lanes on many devices: `sharded_lanes`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from loopax._src.frontend.options import check_callable
from loopax._src.frontend.runtime_checks import Check, collecting, settle
from loopax._src.nnx.functional import freeze, thaw, thaw_numbered
from loopax._src.nnx.writeback import refuse_changes
from loopax._src.pytrees.leaves import Spec, pack
from loopax._src.sharding.assignment import Assignment, assign_lanes
from loopax._src.sharding.in_axes import Arguments, lane_arguments, move_lanes
from loopax._src.sharding.mesh import Devices, check_mesh

_WHERE = "f of sharded_lanes"


def sharded_lanes(
    f: Callable[..., Any], mesh: Mesh, axis: str, *, in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """Map a function with loops in it over lanes that are spread over devices.

    The meaning::

        return jax.vmap(f, in_axes, out_axes)

    Each device runs a batch of its own, with its own numbers of steps, and waits for no other until its lanes are done.
    Where it is known beforehand how many steps the lanes take, or about how much work they are, they are dealt so that
    the devices finish together. That belongs to the data, and is given with them::

        lanes = lx.sharded_lanes(f, mesh, "lanes")
        ys = lanes(xs, lengths, counts=lengths)

    Parameters
    ----------
    f
        `f(*args)` for one lane, with any loops in it. What it closes over is the same for all lanes, on all devices.
    mesh
        The devices. Lanes are spread over one of its axes; over the others, arrays in `f` are sharded as JAX decides.
    axis
        The name of that axis.
    in_axes
        Where each argument has its lanes, as in `jax.vmap`: an int, None for an argument that all lanes share, or a
        tuple with one of these, or a pytree of these, for each argument. What is not an array goes to `f` as it is.
    out_axes
        Where each result has its lanes, as in `jax.vmap`, but not None.

    Returns
    -------
    lanes
        `lanes(*args, counts=None)` returns what `jax.vmap` would, in the same order, sharded along `axis` where the
        devices divide the number of lanes. `counts`: a number for each lane, `(lanes,)`, known or traced: its steps, or
        anything that grows in proportion to its work. Results do not depend on it. Use it under `jax.jit`: outside,
        each call compiles again.

    Raises
    ------
    TypeError
        `f` is not callable, or changes a Flax NNX object in its arguments; `mesh` is not a mesh; `in_axes` or
        `out_axes` is not as above; `counts` are not real numbers.
    ValueError
        `mesh` has no such axis; arguments with unequal numbers of lanes, or without any; `counts` of another shape.

    Notes
    -----
    No device communicates in a loop of `f`. The gradient of what all lanes share is summed over the devices once, at
    the end. Derivatives: all, in every order.

    Every device has as many lanes. Where devices do not divide their number, some devices run a lane that another one
    runs too: the one with the smallest count, or the last one. With `counts`, lanes are dealt in the order of their
    work, the largest first (Graham 1969), which moves the arguments and results of lanes between devices, once each.
    A batch in lockstep takes as long as its longest lane whichever others it holds, so dealing pays for
    `lanes="compact"`. Dealing counts that are known when the program is traced costs nothing at run time; traced ones
    cost a sort and a short step for each lane.

    """
    check_callable(_WHERE, f)
    check_mesh(mesh, axis)

    def lanes(*args: Any, counts: Any = None) -> Any:
        arguments = lane_arguments(freeze(args), in_axes)
        devices = Devices(mesh, axis).with_shardings_of(arguments.arrays)
        results = _run(f, devices, arguments, counts)
        moved = move_lanes(results.spec.unpack(results.arrays), out_axes)
        return thaw(settle(moved, results.checks, devices.mesh))

    return lanes


@dataclass(frozen=True)
class _Results:
    """What `f` returned, lanes first."""

    arrays: list[jax.Array]
    spec: Spec
    checks: list[Check]


def _run(f: Callable[..., Any], devices: Devices, arguments: Arguments, counts: Any) -> _Results:
    """Deal the lanes, run them, and put the results in order."""
    found: dict[str, Any] = {}

    def lane(*arrays: Any) -> tuple[list[Any], list[Any]]:
        given = arguments.spec.unpack(arrays)
        live, objects = thaw_numbered(given)
        with collecting() as checks:
            results, found["spec"] = pack(freeze(f(*live)))
        refuse_changes(_WHERE, given, objects, live, "its arguments, whose lanes")
        found["messages"] = [check.message for check in checks]
        return [check.failed for check in checks], results

    each_device = devices.map(jax.vmap(lane, in_axes=arguments.axes), arguments.axes)
    dealt = assign_lanes(
        arguments.lanes, counts if counts is None else devices.known_everywhere(counts), devices.number
    )

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
    return _Results(results, found["spec"], checks)
