"""The machine that carries out schedules checks every action."""

import pytest

from loopax.schedule import Action
from tests.support.schedule_machine import execute


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
        ([Action("record", 1)], "record"),
        ([Action("record", 0), Action("record", 0)], "record"),
        ([Action("record", 0), Action("reverse", 0)], "reverse"),
        ([Action("record", 0), Action("restore", 0)], "restore"),
        ([Action("record", 0), Action("reverse", 1)], "at the end"),
    ],
)
def test_the_machine_refuses_what_is_not_possible(actions, problem):
    with pytest.raises(ValueError, match=problem):
        execute(actions, 2)


def test_records_take_room_and_save_an_evaluation():
    recorded = [Action("record", 0), Action("reverse", 1), Action("reverse", 0)]
    assert execute(recorded, 2, carry=5, residuals=3) == (2, 3, 1)
    kept = [Action(name, 0) for name in ("keep", "advance")]
    kept += [Action("reverse", 1), Action("restore", 0), Action("drop", 0), Action("reverse", 0)]
    assert execute(kept, 2, carry=5, residuals=3) == (3, 5, 1)
