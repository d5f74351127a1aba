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
from math import comb
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# The published online algorithms, to compare `online` with and to use alone.
#
# Each says, step by step, which carries are stored before the step is taken. From what is stored, `binomial.replay`
# reverses the steps with the fewest evaluations.


def stumm_walther_1(slots: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each step, the stored carries of Algorithm I of Stumm & Walther (2010).

    The algorithm is for up to C(c + 2, 2) - 2 steps with c slots. The evaluations are then as few as with a known
    length, or one more.

    Notes
    -----
    The algorithm has rounds, each one step shorter than the round before. The carry before the first step of a round is
    not stored. The carry before the second step replaces the latest carry that does not have its final place. Each
    other carry replaces the earliest of these.

    """
    stored = []
    for step in range(slots):
        stored.append(step)
        yield tuple(stored)
    step = slots
    for loose in range(slots - 1, 0, -1):  # stored carries that have not found their final place
        yield tuple(stored)
        for turn in range(loose):
            step += 1
            dropped = -1 if turn == 0 else slots - loose
            stored = [*stored[:dropped], *stored[dropped:][1:], step]
            yield tuple(stored)
        step += 1


def stumm_walther_2(slots: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each step, the stored carries of Algorithm II of Stumm & Walther (2010).

    The algorithm is for C(c + 2, 2) - 1 up to C(c + 3, 3) - 3 steps with c slots, and follows Algorithm I. The
    evaluations are at most three more than with a known length.

    Notes
    -----
    A carry is stored three steps after the last one, or where it has its final place. The new carry replaces the latest
    carry whose neighbours are then no further apart than in the end.

    """
    *_, stored = stumm_walther_1(slots)
    gaps = [comb(free + 2, 2) for free in range(slots, 1, -1)]
    final = [sum(gaps[:i]) for i in range(slots)]
    first = comb(slots + 2, 2) - 2
    for step in range(first, comb(slots + 3, 3) - 3):
        last = stored[-1]
        if step == (last + 1 if last + 1 in final else last + 3):
            after = (*stored, step)
            loose = (i for i in range(slots - 1, 0, -1) if after[i] not in final)
            dropped = next((i for i in loose if after[i + 1] - after[i - 1] <= gaps[i - 1]), slots - 1)
            stored = (*after[:dropped], *after[dropped + 1 :])
        yield stored


def wang_moin_iaccarino(slots: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each step, the stored carries of the algorithm of Wang, Moin & Iaccarino (2009).

    The algorithm is for any number of steps. The algorithm needs as few repetitions of a step as possible, but not as
    few evaluations as possible.

    Notes
    -----
    Each stored carry has a level. A carry may be dropped if a later carry has a higher level. If there is none, the
    last carry is dropped, and the new carry gets its level plus one. The first carry is never dropped.

    """
    stored: list[tuple[int, int]] = []  # steps and levels, in order
    step = 0
    while True:
        level = 0
        if len(stored) == slots > 1:
            higher = (i for i in range(slots - 1, 0, -1) if any(later[1] > stored[i][1] for later in stored[i + 1 :]))
            dropped = next(higher, None)
            if dropped is None:
                dropped, level = slots - 1, stored[-1][1] + 1
            del stored[dropped]
        if len(stored) < slots:
            stored.append((step, level))
        yield tuple(s for s, _ in stored)
        step += 1


NEVER = 2**31 - 1


class Online(NamedTuple):
    """The state of the online schedule for c slots: int32 arrays.

    Attributes
    ----------
    stored : int32[c]
        The steps whose carries are stored, ascending; -1 at the front for unused slots.
    slots : int32[c]
        The slot of each stored carry.
    limits : int32[c]
        The most steps from each stored carry to the next: C(f + r - 1, f) for f = c, ..., 1.
    repetitions : int32[]
        r: the number of repetitions that the schedule allows at present.
    stride : int32[]
        The steps from one decision to the next, if possible.

    """

    stored: Any  # [c] the steps whose carries are stored, ascending; -1 at the front for unused slots
    slots: Any  # [c] in which slot each of them is
    limits: Any  # [c] the most steps from each of them to the next: C(f + r - 1, f) for f = c, ..., 1
    repetitions: Any  # [] r
    stride: Any  # [] steps from one decision to the next, if possible


def start(slots: int) -> Online:
    """Return the state of the online schedule before the first step."""
    ids = jnp.arange(slots, dtype=jnp.int32)
    one = jnp.ones((), jnp.int32)
    return Online(jnp.full(slots, -1, jnp.int32), ids, jnp.ones(slots, jnp.int32), one, one)


def store(state: Online, step: Any) -> tuple[Online, Any, Any]:
    """Store the carry before `step`. The first call is for step 0.

    Parameters
    ----------
    state
        The state of the schedule.
    step
        The step before which the carry is stored.

    Returns
    -------
    state
        The next state.
    slot
        The slot that takes the carry.
    distance
        The number of steps to the next call.

    """
    if state.stored.size == 1:
        return state._replace(stored=state.stored * 0), jnp.zeros((), jnp.int32), jnp.int32(NEVER)
    state = _raised(state, step)
    slot, state = _replaced(state, step, _dropped(state, step))
    grows = 16 * (state.stride + 1) ** 2 <= step
    state = state._replace(stride=state.stride + (grows & (state.repetitions > 2)).astype(jnp.int32))
    # Where nothing can be dropped before r grows, the last segment may have as many steps as r now allows.
    possible = _is_unused(state) | jnp.any(_droppable(state, step + state.stride))
    return state, slot, jnp.where(possible, state.stride, jnp.maximum(state.stride, state.repetitions))


def online(slots: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each step of the online schedule, the steps whose carries are stored when this step is taken."""
    for stored, length in _stretches(slots):
        for _ in range(length):
            yield stored


def online_stored(num_steps: int, slots: int) -> tuple[int, ...]:
    """Return the steps whose carries are stored after `num_steps` steps of the online schedule.

    This is result number `num_steps` of `online`, computed without the results before it.
    """
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


def _is_unused(state: Online) -> Any:
    return state.stored[0] < 0


def _droppable(state: Online, step: Any) -> Any:
    """Which stored carries may be dropped to store that before `step`; never the first."""
    following = jnp.concatenate([state.stored[2:], step[None]])
    return jnp.pad(following - state.stored[:-1] <= state.limits[:-1], (1, 0))


def _dropped(state: Online, step: Any) -> Any:
    """The one to drop."""
    droppable = _droppable(state, step)
    earliest = jnp.argmax(droppable)
    latest = droppable.size - 1 - jnp.argmax(droppable[::-1])
    chosen = jnp.where(state.repetitions <= 2, earliest, latest)
    return jnp.where(_is_unused(state), 0, chosen).astype(jnp.int32)


def _raised(state: Online, step: Any) -> Online:
    """With as many repetitions as it takes to drop one."""
    free = jnp.arange(state.stored.size, 0, -1, dtype=jnp.int32)

    def stuck(state: Online) -> Any:
        return ~_is_unused(state) & ~jnp.any(_droppable(state, step))

    def with_one_more(state: Online) -> Online:
        limits = _grown(state.limits, free, state.repetitions)
        return state._replace(limits=limits, repetitions=state.repetitions + 1)

    return lax.while_loop(stuck, with_one_more, state)


def _grown(limits: Any, free: Any, repetitions: Any) -> Any:
    """From C(f + r - 1, f) to C(f + r, f), or to `NEVER` where int32 ends."""
    whole, rest = limits // repetitions, limits % repetitions
    too_large = whole >= NEVER // (free + repetitions)
    product = jnp.where(too_large, 0, whole) * (free + repetitions) + rest * (free + repetitions) // repetitions
    return jnp.where(too_large, NEVER, product)


def _replaced(state: Online, step: Any, dropped: Any) -> tuple[Any, Online]:
    """The slot that becomes free, and the state with it in use for `step`."""
    positions = jnp.arange(state.stored.size, dtype=jnp.int32)
    slot = state.slots[dropped]

    def moved(values: Any, last: Any) -> Any:
        return jnp.where(positions < dropped, values, jnp.concatenate([values[1:], last[None]]))

    return slot, state._replace(stored=moved(state.stored, step), slots=moved(state.slots, slot))


_store = jax.jit(store)
