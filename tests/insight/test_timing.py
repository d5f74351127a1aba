"""Programs are called in turn, and as often as is asked for."""

import time

import pytest

from loopax._src.insight.compare import interleaved


@pytest.mark.parametrize(("warm", "order"), [(False, "abab"), (True, "aabbaabb")])
def test_calls_are_in_turn(warm, order):
    called = []
    times = interleaved([lambda: called.append("a"), lambda: called.append("b")], 2, warm=warm)
    assert "".join(called) == order
    assert len(times) == 2


def test_slow_programs_are_called_in_three_rounds():
    called = []
    (milliseconds,) = interleaved([lambda: called.append(time.sleep(1e-3))], 5, seconds=1e-3)
    assert len(called) == 3
    assert milliseconds >= 1.0
