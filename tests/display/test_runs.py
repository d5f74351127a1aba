"""Displays of several runs, and of loops that do not end as they should."""

import io
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src import progress as public
from tests.display.terminals import begin, write_to

# ---- several runs


def test_runs_on_several_devices_share_a_display(clock_of, log):
    """The one that is furthest behind is shown, and one line at the end."""
    time, displays = clock_of
    numbers = [begin(displays) for _ in range(3)]
    time.now = 0.1
    for time.now in (0.9, 1.05):
        for number, steps in zip(numbers, (50, 30, 70), strict=True):
            displays.report(number, steps, -1)
    time.now = 1.1
    displays.report(numbers[0], 500, -1)
    assert log.getvalue().startswith("loop: 30/1000")
    for number in numbers:
        displays.end(number, 1000)
    assert len(log.getvalue().splitlines()) == 2


def test_stages_add_up(clock_of, log):
    time, displays = clock_of
    for steps, active in ((30, 2), (12, 1)):
        number = begin(displays, total=-1, parts=2)
        time.now += 1.1
        displays.report(number, steps, active)
        displays.end(number, steps)
    assert log.getvalue().splitlines() == [
        "loop: 30 steps, 27.3 steps/s, 2 lanes active",
        "loop: 42 steps, 19.1 steps/s, 1 lane active",
        "loop: 42 steps in 0:00:02, 19.1 steps/s",
    ]


def test_groups_of_lanes_add_up(clock_of, log):
    time, displays = clock_of
    for _ in range(3):
        number = begin(displays, parts=3, lanes=12, size=4)
        time.now += 2.0
        displays.report(number, 50, 3)
        displays.end(number, 100)
    lines = log.getvalue().splitlines()
    assert [re.findall(r"(\d+) lanes", line) for line in lines] == [["11"], ["7"], ["3"], []]
    assert lines[-1].startswith("loop: 300 steps")


# ---- loops that do not end


def test_a_loop_that_is_gone_is_closed_and_comes_back(clock_of, log):
    time, displays = clock_of
    number = begin(displays)
    time.now = 0.05
    displays.report(number, 1, -1)
    displays.look()
    assert log.getvalue() == ""
    time.now = 100.0
    displays.look()
    assert log.getvalue() == "loop: last seen after 1/1000 steps (0%), in 0:01:40\n"
    displays.report(number, 500, -1)
    displays.end(number, 1000)
    assert log.getvalue().splitlines()[-1].startswith("loop: 1000 steps")


def test_a_run_that_died_does_not_hide_the_next(clock_of, log):
    time, displays = clock_of
    dead = begin(displays)
    time.now = 0.1
    displays.report(dead, 10, -1)
    time.now = 5.0
    number = begin(displays)
    time.now = 6.1
    displays.report(number, 700, -1)
    displays.end(number, 1000)
    said = ["last seen after 10/1000 steps (1%)", "700/1000 steps (70%)", "1000 steps in 0:00:01"]
    assert [line.split(",")[0] for line in log.getvalue().splitlines()] == [f"loop: {words}" for words in said]


def failing(at):
    def check(i):
        if i == at:
            raise ValueError("deliberately")
        return np.float32(i)

    step = lambda i, x: x + jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), i)
    return lambda: lx.fori_loop(0, 50, step, jnp.float32(0), progress=lx.Progress("failing"))


def test_a_loop_that_fails_closes_its_display(log):
    with pytest.raises(Exception, match="deliberately"):
        failing(20)()
    (line,) = [line for line in log.getvalue().splitlines() if line.startswith("failing")]
    assert line.startswith("failing: last seen after ")
    assert not public.DISPLAYS._open
    with pytest.raises(Exception, match="deliberately"):
        jax.block_until_ready(jax.jit(failing(20))())
    jax.block_until_ready(jax.jit(failing(-1))())
    public.DISPLAYS.close_all()
    assert log.getvalue().splitlines()[-1].startswith("failing: ")
    assert not public.DISPLAYS._open


def test_what_goes_wrong_in_a_display_does_not_stop_the_loop(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError("broken pipe")

    write_to(monkeypatch, Broken())
    progress = lx.Progress("broken")
    run = jax.jit(lambda: lx.fori_loop(0, 5, lambda i, x: x + 1.0, 0.0, progress=progress))
    with pytest.warns(RuntimeWarning, match="broken pipe"):
        assert run() == 5.0
    assert run() == 5.0  # in silence


def test_other_processes_show_nothing(monkeypatch, log):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert lx.fori_loop(0, 5, lambda i, x: x + 1.0, 0.0, progress=True) == 5.0
    assert log.getvalue() == ""


INTERRUPTED = """
import os, signal, threading, time
import jax.numpy as jnp
import loopax as lx
from loopax._src.progress import DISPLAYS

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background, and ignore it

def interrupt():
    while not DISPLAYS._open:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    lx.while_loop(lambda x: x >= 0, lambda x: jnp.sin(x) ** 2, 1.0, max_steps=2**30, throw=False, progress=True)
except BaseException as error:
    print(type(error).__name__)
print("after")
"""


@pytest.mark.slow
def test_an_interrupt_closes_the_display():
    command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.splitlines() == ["KeyboardInterrupt", "after"]
    assert "while_loop: last seen after" in found.stderr
