"""The online schedules on a machine that checks every action, against their bounds and the known-length optimum."""

from itertools import islice
from math import comb

import jax
import numpy as np
import pytest

from loopax._src.schedule.binomial import evaluations, evaluations_from, forward, replay
from loopax._src.schedule.online import Online, online, online_stored, start, store
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


def test_a_carry_is_stored_once_more_until_another_can_be_dropped():
    """So a schedule that has to allow for more than one more repetition of steps at once takes no step meanwhile."""
    far_apart = np.array([0, 1000, 2000, 3000], np.int32)
    ids, ones, one = np.arange(4, dtype=np.int32), np.ones(4, np.int32), np.int32(1)
    state = Online(far_apart, ids, dropped=np.int32(2), limits=ones, repetitions=one, stride=one)
    slots, lengths = set(), [0]
    while lengths[-1] == 0:
        state, slot, length = jax.jit(store)(state, np.int32(4000))
        slots.add(int(slot))
        lengths.append(int(length))
        assert state.stored.tolist() == [0, 1000, 3000, 4000]
    assert slots == {2}
    assert len(lengths) > 10
    # The one to be dropped is the latest that leaves at most as many steps as may be repeated so often.
    later, free = 4000 + lengths[-1], np.arange(4, 0, -1)
    gaps = [3000 - 0, 4000 - 1000, later - 3000]
    limits = [comb(int(f) + int(state.repetitions) - 1, int(f)) for f in free[:3]]
    assert int(state.dropped) == max(k for k in (1, 2, 3) if gaps[k - 1] <= limits[k - 1])


@each_number_of_slots(1)
def test_it_stores_the_same_without_branches(slots):
    """With r up to 4, on the way to which it raises r in a branch."""
    stored, state, step = jax.jit(store, static_argnums=2), start(slots), 0
    while step < min(STEPS, comb(slots + 4, 4)):
        expected, found = (stored(state, np.int32(step), branches) for branches in (True, False))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        state, step = found[0], step + int(found[2])
