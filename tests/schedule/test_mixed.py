"""Mixed checkpointing: the dynamic program against Maddison's counts, and what loops do against the program."""

from functools import cache
from itertools import islice

import pytest

from loopax._src.schedule.machine import execute
from loopax.schedule import (
    Optimum,
    Prices,
    Sizes,
    evaluations,
    forward,
    mixed,
    mixed_evaluations,
    mixed_evaluations_from,
    online,
    replay,
    starts,
    two_level,
)

STEPS, SLOTS = 200, 20
FAST = (1, 3, 10, 20)  # in `make test`; the others in `make test-slow`
EACH_NUMBER_OF_SLOTS = pytest.mark.parametrize(
    "slots", [pytest.param(s, marks=[] if s in FAST else pytest.mark.slow) for s in range(1, SLOTS + 1)]
)


@cache
def optimum():
    return Optimum(STEPS, SLOTS)


def lengths(slots):
    """All of them for some, and every third one for the others."""
    return range(0, STEPS + 1, 1 if slots in (3, 20) else 3)


@EACH_NUMBER_OF_SLOTS
def test_the_optimum_can_be_carried_out(slots):
    for n in lengths(slots):
        cost = execute(optimum().actions(n, slots), n)
        assert cost.evaluations == optimum().cost(n, slots)
        assert cost.most_stored <= slots


@pytest.mark.parametrize("sizes", [Sizes(1, 2), Sizes(2, 1), Sizes(3, 5)])
def test_other_sizes_and_prices(sizes):
    prices = Prices(1.0, carry=0.125, residuals=0.25)
    program = Optimum(60, 24, sizes, prices)
    for memory in (5, 9, 24):
        for n in range(1, 61, 7):
            actions = list(program.actions(n, memory))
            cost = execute(actions, n, *sizes)
            names = [action.name for action in actions]
            paid = (
                cost.evaluations + 0.125 * (names.count("keep") + names.count("restore")) + 0.5 * names.count("record")
            )
            assert paid == program.cost(n, memory)
            assert cost.most_stored <= memory


def test_without_residuals_it_is_the_binomial_schedule():
    """Where residuals do not fit. The optimum turns the last step round on the way: it need not store its carry."""
    program = Optimum(60, 6, Sizes(1, 7))
    for slots in range(1, 7):
        for n in range(1, 61):
            assert 0 <= evaluations(n, slots) - program.cost(n, slots) <= n


def test_published_counts():
    """Maddison (2024), for 1000 steps: evaluations over steps, where residuals are no larger than a carry."""
    program = Optimum(1000, 44)
    counts = [program.cost(1000, slots) / 1000 for slots in (10, 20, 44)]
    assert counts == pytest.approx([3.92, 2.82, 1.99], abs=0.005)


@pytest.mark.slow
def test_published_count_of_many_slots():
    assert Optimum(1000, 500).cost(1000, 500) == 1500


@EACH_NUMBER_OF_SLOTS
def test_what_loops_do(slots):
    """At most two for each step, or 2.5 % more than the optimum and those behind the last carry stored forward."""
    for n in lengths(slots):
        last = n - max(starts(n, slots), default=0)
        cost = execute(mixed(n, slots), n)
        assert cost.evaluations == mixed_evaluations(n, slots) <= evaluations(n, slots)
        assert cost.evaluations <= max(2 * n, 1.025 * optimum().cost(n, slots) + last)
        assert cost.most_stored <= slots


@pytest.mark.parametrize(("slots", "most"), [(10, 3.92), (20, 2.82), (44, 1.99)])
def test_a_thousand_steps(slots, most):
    assert mixed_evaluations(1000, slots) <= 1.01 * most * 1000


@pytest.mark.parametrize(("slots", "most"), [(10, 3.92), (20, 2.82), (44, 2.0)])
def test_a_thousand_steps_of_unknown_number(slots, most):
    """The online schedule on the way forward, and records in every replay."""
    history = list(islice(online(slots), 1000))
    actions = [*forward(history), *replay(history[-1], 1000, slots, records=True)]
    cost = execute(actions, 1000)
    assert cost.evaluations == mixed_evaluations_from(history[-1], 1000, slots) <= 1.15 * most * 1000
    assert cost.most_stored <= slots


def test_two_levels():
    for n in (1, 7, 30, 100):
        for block in (1, 3, 10):
            cost = execute(two_level(n, block, records=True), n)
            assert cost.evaluations == 2 * n
            assert cost.most_stored <= -(-n // block) + block


def test_many_steps():
    assert mixed_evaluations(10**6, 20) < evaluations(10**6, 20)
    assert mixed_evaluations(0, 3) == 0
    assert mixed_evaluations(10**5, 10**5) == 2 * 10**5
