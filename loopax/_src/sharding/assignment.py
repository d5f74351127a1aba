"""Which device works on which lanes, so that all devices finish together."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from loopax._src.pytrees.leaves import describe

NO_ROOM = float("inf")
MOST_WORK = 1e30  # of one lane: sums of it stay below the largest float32


class Assignment(NamedTuple):
    """Lanes in places; device d has the places `d * width ... (d + 1) * width - 1`."""

    lanes: Any  # int32[places]: the lane in each place; one of them more than once where devices do not divide them
    places: Any  # int32[lanes]: where the result of each lane stands


def assign_lanes(lanes: int, counts: Any, devices: int) -> Assignment | None:
    """The deal for these counts, or without (None); None where every lane may stay in its place."""
    if counts is not None:
        counts = _checked(counts, lanes)
    if devices == 1 or lanes == 0 or (counts is None and lanes % devices == 0):
        return None
    if counts is None:
        return _in_order(lanes, devices)
    if not isinstance(counts, np.ndarray):
        return by_work(counts, devices)
    with jax.ensure_compile_time_eval():
        return Assignment(*map(np.asarray, by_work(jnp.asarray(counts), devices)))


def _checked(counts: Any, lanes: int) -> Any:
    """Counts as an array; one of NumPy where they are known here."""
    known = not isinstance(counts, Tracer) and getattr(counts, "is_fully_addressable", True)
    array = np.asarray(counts) if known else counts
    if not (jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
        raise TypeError(
            f"sharded_lanes(counts=...): got {describe(counts)}, expected a real number for each lane, such as its "
            "number of steps."
        )
    if array.shape != (lanes,):
        raise ValueError(
            f"sharded_lanes(counts=...): got {describe(counts)}, expected shape ({lanes},), a number for each of the "
            f"{lanes} lanes."
        )
    return array


def _in_order(lanes: int, devices: int) -> Assignment:
    """Lanes whose work is not known: the first to the first device, and so on; the last one also fills what is left."""
    places = np.arange(_width(lanes, devices) * devices, dtype=np.int32)
    return Assignment(np.minimum(places, lanes - 1), places[:lanes])


class _Dealing(NamedTuple):
    """The state of a deal."""

    load: Any  # float32[devices]: the work of the lanes that each device has
    held: Any  # int32[devices]: how many these are
    places: Any  # int32[places]: where those are that have been dealt


def by_work(counts: Any, devices: int) -> Assignment:
    """As many lanes to each device, with sums of counts that are as equal as possible.

    The lane with the most work first, each to the device with the least work among those that have room (Graham 1969).
    Places that are left hold the lane with the least work once more. Any counts give a deal, if perhaps no good one.
    """
    lanes, width = len(counts), _width(len(counts), devices)
    work = jnp.clip(jnp.nan_to_num(lax.stop_gradient(counts).astype(jnp.float32)), 0.0, MOST_WORK)
    numbers = jnp.arange(width * devices, dtype=jnp.int32)
    lane_of = jnp.where(numbers < lanes, numbers, jnp.argmin(work).astype(jnp.int32))
    work = work[lane_of]
    order = jnp.argsort(-work).astype(jnp.int32)

    def give(i: Any, dealing: _Dealing) -> _Dealing:
        load, held, places = dealing
        device = jnp.argmin(jnp.where(held < width, load, NO_ROOM)).astype(jnp.int32)
        places = places.at[order[i]].set(device * width + held[device])
        return _Dealing(load.at[device].add(work[order[i]]), held.at[device].add(1), places)

    start = _Dealing(jnp.zeros(devices, jnp.float32), jnp.zeros(devices, jnp.int32), jnp.zeros_like(order))
    places = lax.fori_loop(0, len(order), give, start).places
    return Assignment(jnp.zeros_like(order).at[places].set(lane_of), places[:lanes])


def _width(lanes: int, devices: int) -> int:
    """How many lanes each device has."""
    return -(-lanes // devices)
