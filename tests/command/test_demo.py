"""`python -m loopax demo`: it runs, and what it says is true."""

import re

import jax
import numpy as np
import pytest

from loopax.__main__ import main
from loopax._command import demo as volley
from tests.support.example_files import precision_of_a_user


@pytest.mark.slow
def test_demo(capsys, caplog):
    with precision_of_a_user(), jax.log_compiles(True):
        assert main(["demo"]) == 0
    compiled = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling ")]
    assert len(compiled) <= 8  # which is most of its time
    shown = capsys.readouterr()
    assert "fitted 0.00400, true 0.00400" in shown.out
    by_grad, by_difference = map(float, re.findall(r"(-[\d.]+) m, say", shown.out))
    assert by_grad == pytest.approx(by_difference, rel=1e-4)
    assert "64 lanes" in shown.out
    assert float(re.findall(r"worst miss is ([\d.]+) cm", shown.out)[0]) <= 100 * volley.CLOSE + 0.5
    assert f"fit: {volley.DESCENTS} steps" in shown.err


def test_a_shot_in_python():
    """Step by step, as the loop says; without air it is a parabola."""
    shot, steps = volley.fly(volley.DRAG, (0.0, 0.0, 20.0 * np.cos(0.7), 20.0 * np.sin(0.7))), 0
    while shot[1] > 0 or shot[3] > 0:
        shot, steps = volley.fly(volley.DRAG, shot), steps + 1
    x, y, right, up = shot
    distance, info = jax.jit(volley.shoot)(volley.DRAG, 0.7, 20.0)
    assert distance == pytest.approx(float(x - y * right / up))
    assert info.num_steps == steps
    assert volley.shoot(0.0, 0.7, 20.0)[0] == pytest.approx(20.0**2 * np.sin(1.4) / volley.GRAVITY, rel=1e-2)
