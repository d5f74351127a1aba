"""Slots that hold residuals: the dynamic program against Maddison's counts, and what loops do against the program."""

from functools import cache
from itertools import islice

import pytest

from loopax._src.schedule.binomial import binomial, evaluations, evaluations_from, forward, replay, starts
from loopax._src.schedule.online import online
from tests.schedule.lengths import SLOTS, STEPS, each_number_of_slots, lengths
from tests.schedule.optimum import Optimum
from tests.support.schedule_machine import execute

# Maddison (2024), for 1000 steps: evaluations over steps, where residuals are no larger than a carry.
PUBLISHED = pytest.mark.parametrize(("slots", "most"), [(10, 3.92), (20, 2.82), (44, 1.99)])
LONG = 1000


@cache
def optimum():
    return Optimum(STEPS, SLOTS)


@cache
def long_optimum():
    return Optimum(LONG, 44)


@each_number_of_slots()
def test_what_loops_do(slots):
    """At most two for each step, or 2.5 % more than the optimum and those behind the last carry stored forward."""
    for n in lengths(slots)[::3]:
        last = n - max(starts(n, slots), default=0)
        cost = execute(binomial(n, slots, records=True), n)
        assert cost.evaluations == evaluations(n, slots, records=True) <= evaluations(n, slots)
        assert cost.evaluations <= max(2 * n, 1.025 * optimum().evaluations(n, slots) + last)
        assert cost.most_stored <= slots


@PUBLISHED
def test_a_thousand_steps(slots, most):
    assert long_optimum().evaluations(LONG, slots) / LONG == pytest.approx(most, abs=0.005)
    assert evaluations(LONG, slots, records=True) <= 1.01 * most * LONG


@PUBLISHED
def test_a_thousand_steps_of_unknown_number(slots, most):
    """The online schedule on the way forward, and records in every replay."""
    history = list(islice(online(slots), LONG))
    cost = execute([*forward(history), *replay(history[-1], LONG, slots, records=True)], LONG)
    assert cost.evaluations == evaluations_from(history[-1], LONG, slots, records=True) <= 1.15 * most * LONG
    assert cost.most_stored <= slots
