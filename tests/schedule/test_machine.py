"""The machine that carries out schedules checks every action."""

import pytest

from loopax._src.schedule.machine import execute
from loopax.schedule import Action


@pytest.mark.parametrize(
    ("actions", "problem"),
    [
        ([Action("restore", 0)], "restore"),
        ([Action("advance", 1)], "advance"),
        ([Action("keep", 0), Action("keep", 0)], "keep"),
        ([Action("reverse", 0)], "reverse"),
        ([Action("advance", 0), Action("reverse", 0)], "reverse"),
        ([Action("advance", 0), Action("advance", 1), Action("reverse", 1)], "reverse"),
        ([Action("drop", 0)], "drop"),
        ([Action("keep", 0)], "at the end"),
    ],
)
def test_the_machine_refuses_what_is_not_possible(actions, problem):
    with pytest.raises(ValueError, match=problem):
        execute(actions, 2)
