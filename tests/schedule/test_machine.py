"""The machine that carries out schedules checks every action."""

from typing import Any

import pytest

from loopax.schedule import Action
from tests.support.schedule_machine import execute

IMPOSSIBLE: Any = {
    "restore": [[("restore", 0)], [("record", 0), ("restore", 0)]],
    "advance": [[("advance", 1)]],
    "keep": [[("keep", 0), ("keep", 0)]],
    "reverse": [
        [("reverse", 0)],
        [("advance", 0), ("reverse", 0)],
        [("advance", 0), ("advance", 1), ("reverse", 1)],
        [("record", 0), ("reverse", 0)],
    ],
    "drop": [[("drop", 0)]],
    "record": [[("record", 1)], [("record", 0), ("record", 0)]],
    "at the end": [[("keep", 0)], [("record", 0), ("reverse", 1)]],
}


@pytest.mark.parametrize("problem", IMPOSSIBLE)
def test_the_machine_refuses_what_is_not_possible(problem):
    for actions in IMPOSSIBLE[problem]:
        with pytest.raises(ValueError, match=problem):
            execute([Action(*action) for action in actions], 2)
