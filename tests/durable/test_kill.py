"""Runs that are killed (SIGKILL) at random moments, also in the middle of a save, resume to the same bits.

`make kill-test` does this fifty times with a run of ten seconds; here it is a few times, with a shorter one.
"""

import os
import random
import signal
import time
from hashlib import sha256

import jax
import numpy as np
import pytest

import loopax as lx
from loopax import durable
from tests.hosts.processes import Processes

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("LOOPAX_KILLS", "2"))
STEPS = 9000 if "LOOPAX_KILLS" in os.environ else 900
EVERY = STEPS // 10


def started(path):
    """A run that marks each step that it takes."""
    arguments = [path / "run", STEPS, EVERY, path / "marks"]
    return Processes("tests.hosts.programs:durable_of_all_devices", 1, 1, arguments)


def marked(path):
    """The steps that have been taken, in order, by all processes."""
    return np.fromfile(path / "marks", np.int64).tolist() if (path / "marks").exists() else []


def saves_in(path):
    return len(os.listdir(path / "run" / "saves")) if (path / "run" / "saves").exists() else 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    path = tmp_path_factory.mktemp("uninterrupted")
    with started(path) as process:
        found = process.found()
    assert marked(path) == list(range(STEPS))
    return found


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_runs_resume_to_the_same_bits(number, uninterrupted, tmp_path):
    """Every other one is killed while a save is written."""
    choose = random.Random(number)
    with started(tmp_path) as process:
        if number % 2:
            moment = choose.randrange(1, 9)
            process.wait_until(lambda: len(marked(tmp_path)) > moment * EVERY * 0.7)
            before = saves_in(tmp_path)
            process.wait_until(lambda: saves_in(tmp_path) > before)
            time.sleep(choose.uniform(0, 0.03))
        else:
            moment = choose.randrange(1, STEPS - 1)
            process.wait_until(lambda: len(marked(tmp_path)) > moment)
        process.kill()
        (killed,) = process.wait()
    taken = marked(tmp_path)
    assert killed.returncode == -signal.SIGKILL or len(taken) == STEPS
    assert taken == list(range(len(taken)))

    with started(tmp_path) as process:
        assert process.found() == uninterrupted
    again = marked(tmp_path)[len(taken) :]
    first = again[0] if again else STEPS
    assert again == list(range(first, STEPS))
    assert len(taken) - EVERY <= first <= len(taken)


# ---- a stream of items from a slow source, saved ten times a second

ITEMS = 3000


def stream(directory, marks):
    """The hash of all rows, in the order of the items. An item takes as many steps as it says; each leaves a mark."""

    def chaotic(item):
        x = jax.random.uniform(jax.random.key(item["seed"]), (3,))
        last = lx.fori_loop(0, item["steps"], lambda _, x: 3.9 * x * (1 - x), x, max_steps=200)
        return {"last": last, "steps": item["steps"]}

    def items():
        for i in range(ITEMS):
            time.sleep(0.0003)
            with open(marks, "a") as file:
                file.write("x")
            yield {"seed": np.uint32(i), "steps": np.int32(1 + i * 37 % 190)}

    options = {"num_lanes": 16, "checkpoint_every": 0.1, "chunk_steps": 100}
    found = durable.lanes_stream(chaotic, items(), directory=directory, **options)
    order = np.argsort(found.items)
    assert np.asarray(found.items)[order].tolist() == list(range(ITEMS))
    parts = [found.items, found.results["last"], found.results["steps"]]
    return sha256(b"".join(np.asarray(rows)[order].tobytes() for rows in parts)).hexdigest()


def test_a_stream_that_is_killed_again_and_again_has_each_item_once_and_the_same_bits(tmp_path):
    """One run, which is further at each kill: so long after so many items, those that it skips included."""
    outputs, choose = [], random.Random(5)
    for kills in (0, KILLS):
        run, marks = tmp_path / f"{kills} kills", tmp_path / f"marks {kills}"
        begin = lambda run=run, marks=marks: Processes(f"{__name__}:stream", 1, 1, [run, marks])
        for killed in range(kills):
            fetched = ITEMS * (killed + choose.random()) / kills
            marks.unlink(missing_ok=True)
            with begin() as process:
                process.wait_until(lambda n=fetched, marks=marks: marks.exists() and marks.stat().st_size >= n)
                time.sleep(choose.uniform(0, 0.1))
                process.kill()
                assert process.wait()[0].returncode in (-signal.SIGKILL, 0)
        with begin() as process:
            outputs += process.found()
            said = process.wait()[0].output.splitlines()
        shortened = "Metadata file does not exist"  # of a save cut short
        assert [line for line in said if not line.startswith("found ") and shortened not in line] == []
    assert outputs[0] == outputs[1] != ""
