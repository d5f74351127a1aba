"""The online schedules on a machine that checks every action, against their bounds and the known-length optimum."""

from itertools import chain, islice
from math import comb

import pytest

from loopax._src.schedule.binomial import evaluations, evaluations_from, forward, replay
from loopax._src.schedule.online import online, online_stored
from tests.schedule.lengths import STEPS, each_number_of_slots, lengths
from tests.schedule.published import stumm_walther_1, stumm_walther_2, wang_moin_iaccarino
from tests.support.schedule_machine import execute


def costs(history, slots):
    """What numbers of steps cost, carried out."""
    history = list(islice(history, STEPS))
    for n in lengths(slots, len(history)):
        actions = [*forward(history[:n]), *replay(history[n - 1] if n else (), n, slots)]
        yield n, execute(actions, n)


@each_number_of_slots(2)  # with one, there is only one schedule
@pytest.mark.parametrize("schedule", [online, wang_moin_iaccarino], ids=lambda f: f.__name__)
def test_every_length(schedule, slots):
    for n, cost in costs(schedule(slots), slots):
        assert cost.most_stored <= min(n, slots)
        assert cost.evaluations <= 1.5 * evaluations(n, slots)
    for n, cost in costs(chain(stumm_walther_1(slots), stumm_walther_2(slots)), slots):
        assert cost.most_stored <= min(n, slots)
        assert cost.evaluations <= evaluations(n, slots) + 3


@each_number_of_slots(1)
def test_two_repetitions_are_optimal(slots):
    """Stumm & Walther (2010): as few evaluations as with a known length, while two repetitions are enough."""
    for n, stored in enumerate(islice(online(slots), comb(slots + 2, 2) - 1), 1):
        assert evaluations_from(stored, n, slots) == evaluations(n, slots)


@each_number_of_slots(1)
def test_their_algorithm_1_is_optimal(slots):
    """But for the last step of some lengths: they count what is current at the end as stored."""
    history = list(stumm_walther_1(slots))
    assert len(history) == comb(slots + 2, 2) - 2
    for n, stored in enumerate(history, 1):
        assert 0 <= evaluations_from(stored, n, slots) - evaluations(n, slots) <= 1


@each_number_of_slots(2)
def test_their_algorithm_2_is_nearly_optimal(slots):
    first, history = comb(slots + 2, 2) - 1, list(stumm_walther_2(slots))
    assert first + len(history) == comb(slots + 3, 3) - 2
    for n, stored in enumerate(history, first):
        assert len(stored) == slots
        assert 0 <= evaluations_from(stored, n, slots) - evaluations(n, slots) <= 3


@each_number_of_slots(1)
def test_as_few_repetitions_as_possible(slots):
    """Wang, Moin & Iaccarino (2009): a step is replayed at most r times if n <= C(c + r, c)."""
    history = list(islice(wang_moin_iaccarino(slots), STEPS))
    for n in lengths(slots)[1:]:
        stored = history[n - 1]
        repetitions = next(r for r in range(n + 1) if comb(slots + r, r) >= n)
        constant = (stored for _ in range(n))  # only the replay counts
        cost = execute([*forward(constant), *replay(stored, n, slots)], n)
        assert cost.repetitions <= 1 + repetitions


# The worst ratios to the optimum of a known length, as docs/kinds.md has them; at most 1.5 is promised.
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
