"""Runs that are killed (SIGKILL) at random moments, also in the middle of a save, resume to the same bits.

`make kill-test` does this fifty times with a run of ten seconds; here it is a few times, with a shorter one.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.durable import stream_victim, victim

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("LOOPAX_KILLS", "2"))
LONG = "LOOPAX_KILLS" in os.environ
STEPS = 9000 if LONG else 900
EVERY = STEPS // 10
ROOT = Path(__file__).parents[2]


def started(module, *arguments):
    """A process that is optimized, on one device."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.durable.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(directory, marks):
    return started("victim", directory, marks, 0.001, STEPS, EVERY)


def wait_for(condition, process):
    while not condition() and process.poll() is None:
        time.sleep(0.002)


def steps_of(marks):
    """How many steps have been taken, 8 bytes for each."""
    return marks.stat().st_size // 8 if marks.exists() else 0


def saves_in(directory):
    return len(os.listdir(directory / "saves")) if (directory / "saves").exists() else 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    path = tmp_path_factory.mktemp("uninterrupted")
    process = start(path / "run", path / "marks")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert victim.marked(path / "marks") == list(range(STEPS))
    return out.strip()


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_runs_resume_to_the_same_bits(number, uninterrupted, tmp_path):
    """Every other one is killed while a save is written."""
    choose = random.Random(number)
    directory, marks = tmp_path / "run", tmp_path / "marks"
    process = start(directory, marks)
    if number % 2:
        moment = choose.randrange(1, 9)
        wait_for(lambda: steps_of(marks) > moment * EVERY * 0.7, process)
        before = saves_in(directory)
        wait_for(lambda: saves_in(directory) > before, process)
        time.sleep(choose.uniform(0, 0.03))
    else:
        moment = choose.randrange(1, STEPS - 1)
        wait_for(lambda: steps_of(marks) > moment, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    taken = victim.marked(marks)
    assert process.returncode == -signal.SIGKILL or len(taken) == STEPS
    assert taken == list(range(len(taken)))

    process = start(directory, marks)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.strip() == uninterrupted
    again = victim.marked(marks)[len(taken) :]
    first = again[0] if again else STEPS
    assert again == list(range(first, STEPS))
    assert len(taken) - EVERY <= first <= len(taken)


def start_stream(path):
    return started("stream_victim", path / "run", path / "marks")


def kill_stream(path, fetched, seconds):
    """Kill it so long after so many items have been fetched, those that it skips included."""
    marks = path / "marks"
    marks.unlink(missing_ok=True)
    process = start_stream(path)
    wait_for(lambda: marks.exists() and marks.stat().st_size >= fetched, process)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0)


def test_a_stream_that_is_killed_again_and_again_has_each_item_once_and_the_same_bits(tmp_path):
    """One run, which is further at each kill."""
    outputs, choose = [], random.Random(5)
    for kills in (0, KILLS):
        path = tmp_path / f"{kills} kills"
        path.mkdir()
        for killed in range(kills):
            kill_stream(path, stream_victim.ITEMS * (killed + choose.random()) / kills, choose.uniform(0, 0.1))
        out, err = start_stream(path).communicate(timeout=120)
        said = [line for line in err.splitlines() if "Metadata file does not exist" not in line]  # of a save cut short
        assert not said, err
        outputs.append(out.strip())
    assert outputs[0] == outputs[1] != ""
