"""The online schedules on a machine that checks every action, against their bounds and the known-length optimum."""

from itertools import islice
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.schedule.binomial import evaluations, evaluations_from, forward, replay
from loopax._src.schedule.online import (
    NEVER,
    Online,
    online,
    online_stored,
    start,
    start_in_one_array,
    store,
    store_if_due,
    unused_in,
)
from tests.schedule.lengths import STEPS, each_number_of_slots, lengths
from tests.support.schedule_machine import execute


@each_number_of_slots(2)  # with one, there is only one schedule
def test_every_length(slots):
    history = list(islice(online(slots), STEPS))
    for n in lengths(slots):
        cost = execute([*forward(history[:n]), *replay(history[n - 1] if n else (), n, slots)], n)
        assert cost.most_stored <= min(n, slots)
        assert cost.evaluations <= 1.5 * evaluations(n, slots)


@each_number_of_slots(1)
def test_two_repetitions_are_optimal(slots):
    """Stumm & Walther (2010): as few evaluations as with a known length, while two repetitions are enough."""
    for n, stored in enumerate(islice(online(slots), comb(slots + 2, 2) - 1), 1):
        assert evaluations_from(stored, n, slots) == evaluations(n, slots)


# The worst ratios to the optimum of a known length: docs/kinds.md says at most 1.15 up to 64 slots.
WORST = [(1, 1.0), (2, 1.11), (3, 1.15), (4, 1.08), (5, 1.06), (10, 1.05), (20, 1.07), (44, 1.07), (64, 1.08)]


@pytest.mark.parametrize(
    ("slots", "most"),
    [pytest.param(*worst, marks=pytest.mark.slow if worst[0] in (5, 20, 44) else []) for worst in WORST],
)
def test_many_steps(slots, most):
    steps = {*range(1, 300), *range(300, 3000, 13), *range(3000, 100_000, 844), 100_000}
    history = islice(online(slots), max(steps))
    ratios = [
        evaluations_from(stored, n, slots) / evaluations(n, slots) for n, stored in enumerate(history, 1) if n in steps
    ]
    assert most - 0.02 < max(ratios) <= most


def test_the_first_carry_is_never_dropped():
    history = list(islice(online(4), 5000))
    assert all(stored[0] == 0 for stored in history)
    for n in (1, 2, 100, 5000):
        assert online_stored(n, 4) == history[n - 1]


def test_the_last_carry_is_dropped_where_none_may_be():
    """Of steps too far apart, as the schedule itself leaves none: the others stay, and more repetitions come."""
    far_apart = np.array([0, 1000, 2000, 3000], np.int32)
    ids, ones, one = np.arange(4, dtype=np.int32), np.ones(4, np.int32), np.int32(1)
    state = Online(far_apart, ids, dropped=np.int32(2), limits=ones, repetitions=one, stride=one)
    for step in (4000, 4001, 4003):
        state, slot, length = jax.jit(store)(state, np.int32(step))
        assert int(slot) == 2
        assert int(length) == int(state.repetitions) - 1
        assert state.stored.tolist() == [0, 1000, 3000, step]
        assert int(state.dropped) == 3


@pytest.mark.parametrize("slots", [2, 10, 64])
def test_one_can_be_dropped_wherever_the_schedule_comes_to(slots):
    """Up to the last step that can be counted: what its neighbours become is no longer than its repetitions allow."""

    def body(at):
        state, step, too_long = at
        state, _, length = store(state, step)
        before, after = state.dropped - 1, jnp.append(state.stored, step + length)[state.dropped + 1]
        segment = after - state.stored[before]
        return state, step + length, too_long | ((before >= 0) & (segment > state.limits[before]))

    start_at = start(slots), np.int32(0), np.bool_(False)
    _, step, too_long = jax.jit(lambda at: jax.lax.while_loop(lambda at: at[1] < 2**31 - 400_000, body, at))(start_at)
    assert int(step) >= 2**31 - 400_000
    assert not too_long


def test_one_slot_in_one_array():
    """It has the first carry, and no other."""
    table, slot, is_due = store_if_due(start_in_one_array(1), jnp.int32(0), 1)
    assert is_due
    assert (int(slot), int(table[0, 0]), int(table[4, 3])) == (0, 0, NEVER)


@each_number_of_slots(2)
def test_it_stores_the_same_in_one_array(slots):
    """With r up to 4, on the way to which it raises r in a branch; nothing changes where no carry is due."""
    stored, if_due = jax.jit(store), jax.jit(store_if_due, static_argnums=2)
    state, table, step = start(slots), start_in_one_array(slots), 0
    while step < min(STEPS, comb(slots + 4, 4)):
        before, _, is_due = if_due(table, np.int32(step + 1), slots)
        assert not is_due
        np.testing.assert_array_equal(before, table)
        (state, slot, length), (table, found, is_due) = (
            stored(state, np.int32(step)),
            if_due(table, np.int32(step), slots),
        )
        assert is_due
        assert found == slot
        for row, expected in zip(table, (state.stored, state.slots, state.limits), strict=False):
            np.testing.assert_array_equal(row[:slots], expected)
        step += int(length)
        unused = state.stored.tolist().count(-1)
        assert table[4, :5].tolist() == [state.dropped, state.repetitions, state.stride, step, unused]
        assert unused_in(table) == unused
