"""Durable runs of several processes: the bits of one process, and none hangs where another is killed."""

import json
import time

import jax
import pytest

from loopax import durable
from tests.hosts import durable_programs
from tests.hosts.processes import Processes, run
from tests.hosts.programs import shards

pytestmark = pytest.mark.slow

PROGRAM = "tests.hosts.durable_programs:show"
STEPS = 1500


def shards_of(found):
    """Of all processes, by name."""
    assert [result.returncode for result in found] == [0] * len(found), found
    lines = [line for result in found for line in result.output.splitlines() if line.startswith("shards: ")]
    return [json.loads(line.removeprefix("shards: ")) for line in lines]


def test_a_run_whose_process_is_killed_resumes_with_other_processes_to_the_bits_of_one(tmp_path):
    """Two processes of two devices, of which one is killed; then four."""
    directory = tmp_path / "run"
    with Processes(PROGRAM, 2, args=[directory, STEPS], heartbeat=4) as processes:
        deadline = time.monotonic() + 60
        while durable.steps_saved(directory) < durable_programs.EVERY and time.monotonic() < deadline:
            time.sleep(0.01)
        processes.kill(1)
        ended = processes.wait(timeout=60)
    assert all(result.returncode != 0 for result in ended)
    assert 0 < durable.steps_saved(directory) < STEPS

    several = shards_of(run(PROGRAM, 4, args=[directory, STEPS], timeout=90))
    alone = shards(durable_programs.results(jax.devices(), str(tmp_path / "alone"), STEPS))
    for name, wanted in alone.items():
        found = {(place, bits) for process in several for place, bits in process[name]}
        assert found == {(place, bits) for place, bits in wanted}
