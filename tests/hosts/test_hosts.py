"""Several processes as one: `jax.distributed` on the loopback interface, and a durable run of which one dies."""

import jax
import numpy as np
import pytest

import loopax as lx
from loopax import durable
from tests.hosts.processes import Processes
from tests.hosts.programs import durable_results, gradient_results, measured_slope, results, shards


@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_bits_are_those_of_one_process(num_processes):
    """All but the sum over devices, which processes may add up in another order."""
    with Processes("tests.hosts.programs:of_all_devices", num_processes) as processes:
        several = processes.found()
    alone = shards(results(jax.devices()[: 2 * num_processes]))
    found = {name: sorted(shard for process in several for shard in process[name]) for name in alone}
    assert all(len(shards) == 2 * num_processes for shards in found.values())
    (summed,), (wanted,) = ({bits for _, bits in group.pop("['lanes']['weight']")} for group in (found, alone))
    assert found == alone
    value, expected = (float(np.frombuffer(bytes.fromhex(bits))[0]) for bits in (summed, wanted))
    assert value == pytest.approx(expected, rel=1e-14)


@pytest.mark.slow
def test_a_run_whose_process_is_killed_resumes_with_other_processes_to_the_bits_of_one(tmp_path):
    """Two processes of two devices, of which one is killed; then four. None hangs."""
    program, steps, every = "tests.hosts.programs:durable_of_all_devices", 1500, 100
    arguments = [tmp_path / "run", steps, every]
    with Processes(program, 2, args=arguments, heartbeat=4) as processes:
        processes.wait_until(lambda: durable.steps_saved(tmp_path / "run") >= every)
        processes.kill(1)
        ended = processes.wait(timeout=60)
    assert all(result.returncode != 0 for result in ended)
    assert 0 < durable.steps_saved(tmp_path / "run") < steps

    with Processes(program, 4, args=arguments) as processes:
        several = processes.found()
    alone = shards(durable_results(jax.devices(), str(tmp_path / "alone"), steps, every))
    for name, wanted in alone.items():
        found = {(place, bits) for process in several for place, bits in process[name]}
        assert found == {(place, bits) for place, bits in wanted}


def test_processes_take_what_the_folder_of_the_first_one_has(tmp_path):
    """Without one they take what `Auto` does, and warn; they measure nothing."""
    measured_slope(lx.Tuned(cache=tmp_path / "0"), 1.5)
    (entry,) = (tmp_path / "0").iterdir()
    entry.write_text('{"chosen": "Checkpointed()", "reason": "made by hand"}')
    with Processes("tests.hosts.programs:tuned_of_all", 2, args=[tmp_path]) as processes:
        found = processes.found()
    assert found == [[True, False, ["Tuned(): several processes run this program"]]] * 2


@pytest.mark.slow
def test_processes_divide_a_gradient_by_what_the_first_one_measures(tmp_path):
    """Each chooses for itself otherwise, and they wait for each other for good."""
    with Processes("tests.hosts.programs:gradient_of_unlike_clocks", 2, args=[tmp_path]) as processes:
        ours, theirs = processes.found()
    assert ours["['value']"] == theirs["['value']"]


@pytest.mark.slow
def test_the_gradient_of_a_long_run_of_several_processes_that_are_killed(tmp_path):
    """Two processes of two devices: one is killed on the way back. The gradient is that of one process."""
    program, marks = "tests.hosts.programs:gradient_of_all_devices", tmp_path / "marks"
    with Processes(program, 2, args=[tmp_path / "run", marks, 0.1], heartbeat=4) as processes:
        processes.wait_until(lambda: marks.exists() and marks.stat().st_size > 2 * 60)
        processes.kill(1)
        ended = processes.wait(timeout=60)
    assert all(result.returncode != 0 for result in ended)
    with Processes(program, 2, args=[tmp_path / "run"]) as processes:
        resumed = processes.found()
    with Processes(program, 2, args=[tmp_path / "new"]) as processes:
        assert processes.found() == resumed
    alone = shards(gradient_results(jax.devices()[:4], str(tmp_path / "alone"), memory=2**22))
    numbers = lambda bits: np.frombuffer(bytes.fromhex(bits))
    for name, wanted in alone.items():
        found = {place: bits for process in resumed for place, bits in process[name]}
        assert found.keys() == {place for place, _ in wanted}
        for place, bits in wanted:
            np.testing.assert_allclose(numbers(found[place]), numbers(bits), 1e-12)
