"""Numbers of slots and of steps for which schedules are carried out."""

import pytest

STEPS, SLOTS = 200, 20
FAST = (1, 2, 3, 5, 10, 20)  # with every number of steps in `make test`; the others with some in `make test-slow`


def each_number_of_slots(fewest: int = 1) -> pytest.MarkDecorator:
    slots = [pytest.param(s, marks=[] if s in FAST else pytest.mark.slow) for s in range(fewest, SLOTS + 1)]
    return pytest.mark.parametrize("slots", slots)


def lengths(slots: int, most: int = STEPS) -> range:
    return range(most + 1) if slots in FAST else range(slots % 7, most + 1, 7)
