"""The same on several processes as in one: `jax.distributed` on the loopback interface."""

import json

import jax
import numpy as np
import pytest

from tests.hosts.processes import run
from tests.hosts.programs import results, shards


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def pair(request):
    """The shards of all processes, and those of one process with as many devices."""
    found = run("tests.hosts.programs:show", request.param)
    assert [result.returncode for result in found] == [0] * request.param, found
    lines = [line for result in found for line in result.output.splitlines() if line.startswith("shards: ")]
    return [json.loads(line.removeprefix("shards: ")) for line in lines], jax.devices()[: 2 * request.param]


def test_the_bits_are_those_of_one_process(pair):
    """All but the sum over devices, which processes may add up in another order."""
    several, devices = pair
    alone = shards(results(devices))
    found = {name: sorted(shard for process in several for shard in process[name]) for name in alone}
    assert all(len(shards) == len(devices) for shards in found.values())
    (summed,), (wanted,) = ({bits for _, bits in group.pop("['lanes']['weight']")} for group in (found, alone))
    assert found == alone
    assert value(summed) == pytest.approx(value(wanted), rel=1e-14)


def value(bits):
    """A float64 from its bits, as `shards` writes them."""
    return float(np.frombuffer(bytes.fromhex(bits))[0])
