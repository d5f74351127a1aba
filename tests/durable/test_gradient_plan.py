"""How a gradient of a long run is divided: the budget of memory, where states are kept, and what is evaluated."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from loopax._src.durable.gradient_plan import Choice, _fastest, evaluated, fewest
from loopax._src.durable.states import Plan

FREE = Choice(1, "residuals", 1.0, 0.0, 0.0)  # writes and reads take no time
CASES = [
    (chunks, memory, disk)
    for chunks, memory in product((10, 30, 100, 300, 1000, 3000, 10_000), (5, 20, 60))
    for disk in sorted({max(chunks // 10, 1), chunks // 3, chunks - 1})
    if memory < chunks
]


def planned(chunks: int, memory: int, disk: int, seconds: float = 0.0) -> Plan:
    """For transfers of so many seconds, and chunks of one second; the first state is in one of the places in memory."""
    return _fastest(Plan(chunks, 1, disk, memory - 1), replace(FREE, write_seconds=seconds, read_seconds=seconds))


@pytest.mark.parametrize(("chunks", "memory", "disk"), CASES)
def test_evaluations_are_as_few_as_those_of_checkpoint_schedules(chunks, memory, disk):
    schedules = pytest.importorskip("checkpoint_schedules", reason="which the lock file of Python 3.11 alone has")
    theirs = evaluations_of(schedules, schedules.MultistageCheckpointSchedule(chunks, memory, disk))
    assert evaluated(planned(chunks, memory, disk)) == fewest(chunks, memory + disk) == theirs


@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(("chunks", "memory", "disk"), [case for case in CASES if case[0] <= 100])
def test_evaluations_where_transfers_take_time(chunks, memory, disk, seconds):
    """H-Revolve knows their time, but not that they run beside the computation."""
    schedules = pytest.importorskip("checkpoint_schedules", reason="which the lock file of Python 3.11 alone has")
    theirs = evaluations_of(schedules, schedules.HRevolve(chunks, memory, disk, 1, 1, seconds, seconds))
    assert evaluated(planned(chunks, memory, disk, seconds)) <= 1.02 * theirs


def evaluations_of(schedules: Any, schedule: Any) -> int:
    """How many steps a schedule takes."""
    total = 0
    for action in schedule:
        if isinstance(action, schedules.Forward):
            total += min(action.n1, schedule.max_n) - action.n0
        if isinstance(action, schedules.EndReverse):
            break
    return total
