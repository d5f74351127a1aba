"""The online schedule: which carries to store while nobody knows how many steps there will be.

All slots are in use soon. From then on, storing a carry means to drop another. One may be dropped if
the steps between its neighbours, which become one segment, can still be reversed with r - 1 repetitions
with the slots that will be free when their turn comes: if they are at most C(c + r - 1, c), where c are these
slots. When none can be dropped, r grows by one. For r = 2 the earliest is dropped, and the number
of evaluations is the least possible one; from r = 3 on the latest is.

That is Algorithm I of Stumm & Walther (2010) for r = 2, and the rule of their Algorithm II for r = 3,
continued for all r. From r = 3 on not every step is considered, but one in `stride`, about a quarter of the
square root of the steps so far: so many steps in front of the end, which may have to be reversed with
one slot, cost about n / 32 evaluations.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NEVER = 2**31 - 1


class Online(NamedTuple):
    """The state of the online schedule for c slots: int32 arrays."""

    stored: Any  # [c] the steps whose carries are stored, ascending; -1 at the front for unused slots
    slots: Any  # [c] in which slot each of them is
    dropped: Any  # [] which of them the next one takes the place of
    limits: Any  # [c] the most steps from each of them to the next: C(f + r - 1, f) for f = c, ..., 1
    repetitions: Any  # [] r
    stride: Any  # [] steps from one decision to the next, if possible


def start(slots: int) -> Online:
    """The state before the first step."""
    return jax.tree.map(jnp.asarray, _start(slots))


def _start(slots: int) -> Online:
    stored, ids, limits = np.full(slots, -1), np.arange(slots)[::-1], np.ones(slots)
    return Online(*(np.asarray(x, np.int32) for x in (stored, ids, 0, limits, 1, 1)))


def store(state: Online, step: Any) -> tuple[Online, Any, Any]:
    """Store the carry before `step`, which is 0 in the first call.

    Returns the next state, the slot that takes the carry, and the number of steps to the next call.
    """
    count = state.stored.size
    if count == 1:
        return state._replace(stored=state.stored * 0), jnp.zeros((), jnp.int32), jnp.int32(NEVER)
    # Those behind the dropped one move forward, and `step` stands last, in the slot that has become free.
    slot, positions = state.slots[state.dropped], jnp.arange(count, dtype=jnp.int32)

    def moved(values: Any, last: Any) -> Any:
        return jnp.where(positions < state.dropped, values, _joined(values, last))

    stored, repetitions = moved(state.stored, step), state.repetitions
    grows = (16 * (state.stride + 1) ** 2 <= step) & (repetitions > 2)
    stride = state.stride + grows.astype(jnp.int32)
    soon = _droppable(stored, _joined(stored[1:], step + stride), state.limits, repetitions)

    # Where nothing can be dropped before r grows, the last segment may have as many steps as r now allows. Then one can
    # be, wherever the schedule comes to (tests/schedule/test_online.py); if not, the last one is.
    def with_one_more() -> tuple[Any, Any, Any]:
        limits, longer = _raised(state.limits, repetitions, count), jnp.maximum(stride, repetitions)
        later = _droppable(stored, _joined(stored[1:], step + longer), limits, repetitions + 1)
        return limits, jnp.where(later > 0, later, count - 1), longer

    # While slots are unused, r is 1, and so only these can be dropped: the second one, or the first if it is the last.
    raises = (soon == 0) & (stored[0] >= 0)
    limits, dropped, length = lax.cond(raises, with_one_more, lambda: (state.limits, soon, stride))
    slots, repetitions = moved(state.slots, slot), repetitions + raises.astype(jnp.int32)
    return Online(stored, slots, dropped, limits, repetitions, stride), slot, length


# What `store` decides, in few kernels: for devices on which a kernel counts, and not what it computes. The state is one
# array, int32[5, max(c, 5)]. Its rows are `stored`, `slots`, `limits`, the limits for one repetition more, and numbers:
# `dropped`, `repetitions`, `stride`, the step before which the next carry is stored, and the number of unused slots.
# What the branch of `store` computes is computed in each step, whether a carry is stored before it or not.


def start_in_one_array(slots: int) -> Any:
    """As `start`."""
    state, table = _start(slots), np.zeros((5, max(slots, 5)), np.int32)
    table[:4, :slots] = state.stored, state.slots, state.limits, np.arange(slots + 1, 1, -1)
    table[4, :5] = state.dropped, state.repetitions, state.stride, 0, slots
    return jnp.asarray(table)


def due_in(state: Any) -> Any:
    """The step before which the next carry is stored."""
    return state[4, 3]


def unused_in(state: Any) -> Any:
    """How many slots have no carry."""
    return state[4, 4]


def store_if_due(state: Any, step: Any, count: int) -> tuple[Any, Any, Any]:
    """Store the carry before `step` in one of c slots, if it is due; also the slot, and whether it is."""
    stored, slots, limits, raised, (dropped, repetitions, stride, due, unused, *_) = state
    slot = lax.dynamic_index_in_dim(slots, dropped, keepdims=False, allow_negative_indices=False)
    positions = jnp.arange(state.shape[1], dtype=jnp.int32)

    def following(values: Any, last: Any, distance: int = 1) -> Any:
        moved = lax.pad(values[distance:], jnp.int32(0), [(0, distance, 0)])
        return jnp.where(positions == count - distance, last, moved)

    stored, slots = (
        jnp.where(positions < dropped, values, following(values, last))
        for values, last in ((stored, step), (slots, slot))
    )
    grows = (16 * (stride + 1) ** 2 <= step) & (repetitions > 2)
    stride = stride + grows.astype(jnp.int32)
    longer = jnp.maximum(stride, repetitions)

    # Which can be dropped: in the first row as it is, in the second with one repetition more.
    more = jnp.arange(2, dtype=jnp.int32)[:, None] == 1
    reach = jnp.where(more, step + longer, step + stride)
    reach = jnp.where(positions[None] == count - 2, reach, following(stored, 0, 2)[None])
    can = (reach - stored[None] <= jnp.where(more, raised[None], limits[None])) & (positions[None] < count - 1)
    earliest = repetitions + more.astype(jnp.int32) <= 2
    keys = jnp.where(earliest, count - 1 - positions[None], positions[None] + 1)
    found = jnp.max(jnp.where(can, keys, 0), 1)
    soon, later = jnp.where(earliest[:, 0] & (found > 0), count - found, found)
    raises = (soon == 0) & (stored[0] >= 0)
    limits, repetitions = jnp.where(raises, raised, limits), repetitions + raises.astype(jnp.int32)
    raised = jnp.where(raises, _raised(raised, repetitions, count), raised)
    dropped = jnp.where(raises, jnp.where(later > 0, later, count - 1), soon)
    length = jnp.where(raises, longer, stride) if count > 1 else NEVER
    unused = jnp.maximum(unused - 1, 0)
    numbers = (dropped, repetitions, stride, step + jnp.minimum(length, NEVER - step), unused)
    row = reduce(jnp.add, (jnp.where(positions == i, number, 0) for i, number in enumerate(numbers)))
    places, is_due = jnp.arange(5, dtype=jnp.int32)[:, None], step == due
    rows = enumerate((stored, slots, limits, raised, row))
    new = reduce(jnp.add, (jnp.where(places == i, row[None], 0) for i, row in rows))
    return jnp.where(is_due, new, state), slot, is_due


_store = jax.jit(store)


def online(checkpoints: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each step of the online schedule, the steps whose carries are stored when this step is taken.

    Parameters
    ----------
    checkpoints
        The most carries that are stored, at least 1.

    """
    for stored, length in _stretches(checkpoints):
        for _ in range(length):
            yield stored


def online_stored(num_steps: int, slots: int) -> tuple[int, ...]:
    """Result number `num_steps` of `online`, without the results before it; none are stored before the first step."""
    step = 0
    for stored, length in _stretches(slots):
        step += length
        if step >= num_steps:
            return stored if num_steps else ()
    raise AssertionError("the schedule has no end")


def _stretches(slots: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Which carries are stored, and for how many steps."""
    state, step = start(slots), 0
    while True:
        state, _, length = _store(state, jnp.int32(step))
        yield tuple(s for s in state.stored.tolist() if s >= 0), int(length)
        step += int(length)


def _joined(values: Any, last: Any) -> Any:
    """Each value's next one; of the last value, `last`."""
    return jnp.concatenate([values[1:], last[None]])


def _droppable(stored: Any, following: Any, limits: Any, repetitions: Any) -> Any:
    """Which stored carry to drop: the earliest that can be, or the latest; 0: none can.

    `following`: for each but the last, the carry behind the next one, to which its segment would reach.
    """
    count = stored.size
    positions = jnp.arange(1, count, dtype=jnp.int32)
    earliest = repetitions <= 2
    keys = jnp.where(earliest, count - positions, positions)
    best = jnp.max(jnp.where(following - stored[:-1] <= limits[:-1], keys, 0))
    return jnp.where(earliest & (best > 0), count - best, best)


def _raised(limits: Any, repetitions: Any, count: int) -> Any:
    """The limits for one repetition more: from C(f + r - 1, f) to C(f + r, f), or to `NEVER` where int32 ends."""
    factors = jnp.arange(count, count - limits.size, -1, dtype=jnp.int32) + repetitions
    factors, repetitions, most = jnp.broadcast_arrays(factors, repetitions, jnp.int32(NEVER))
    whole = lax.div(limits, repetitions)  # `//` would ask for signs
    rest = limits - whole * repetitions
    too_large = whole >= lax.div(most, factors)
    return jnp.where(too_large, NEVER, jnp.where(too_large, 0, whole) * factors + lax.div(rest * factors, repetitions))
