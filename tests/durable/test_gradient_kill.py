"""A gradient whose process is killed (SIGKILL) at random moments of all passes ends with the same bits.

`make kill-test` does this fifty times; here it is a few times.
"""

import os
import random
import signal
import time

import pytest

from tests.hosts.processes import Processes

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("LOOPAX_KILLS", "3"))
PROGRAM = "tests.hosts.programs:gradient_of_all_devices"
EVERY = 0.1  # seconds


def begun(path):
    return Processes(PROGRAM, 1, 1, [path / "run", path / "marks", EVERY])


def marks(path):
    """How many chunks have been evaluated, also by processes that were killed."""
    return os.path.getsize(path / "marks") if (path / "marks").exists() else 0


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    """It loses at most what is evaluated between two saves, and what has to be computed again for it."""
    choose, undisturbed = random.Random(7), tmp_path / "undisturbed"
    undisturbed.mkdir()
    with begun(undisturbed) as process:
        expected = process.found()
    most = marks(undisturbed)
    for number in range(KILLS):
        before = marks(tmp_path)
        with begun(tmp_path) as process:
            some = choose.randrange(1, max(2 * most // KILLS, 2) + 20)
            process.wait_until(lambda some=some, before=before: marks(tmp_path) >= before + some)
            time.sleep(choose.uniform(0, 0.03))
            process.kill()
            (killed,) = process.wait()
        assert killed.returncode in (-signal.SIGKILL, 0), (number, killed)
    with begun(tmp_path) as process:
        assert process.found() == expected
        (last,) = process.wait()
    assert [line for line in last.output.splitlines() if "amaged" in line] == []
