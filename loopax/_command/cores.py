"""What lanes gain from the cores of a CPU: `sharded_lanes` on as many CPU devices, beside one device.

`python -m loopax._command.cores N` is the process that has N devices: JAX asks for their number before it starts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import loopax as lx
from loopax._src.insight.compare import interleaved

LANES, UNITS, STEPS, ROUNDS = 64, 256, 50, 5
MOST_SECONDS = 120
_DEVICES_FLAG = "--xla_force_host_platform_device_count"  # JAX refuses it beside `jax_num_cpu_devices`


class Gain(NamedTuple):
    """What one way to run lanes takes on one device, and on all."""

    lanes: str
    alone: float  # seconds
    together: float  # seconds

    @property
    def times(self) -> float:
        """How many times as fast."""
        return self.alone / self.together


def usable() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gains(cores: int) -> list[Gain]:
    """Of lanes in lockstep and one after another, measured in a process with so many devices."""
    command = [sys.executable, "-m", "loopax._command.cores", str(cores)]
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES_FLAG)]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=True, env=environment)
    return [Gain(*row) for row in json.loads(found.stdout.splitlines()[-1])]


def measured(cores: int) -> list[Gain]:
    """What `gains` returns, of this process, which has so many devices."""
    weights = np.random.RandomState(0).randn(UNITS, UNITS).astype(np.float32) / UNITS**0.5
    starts, counts = np.ones((LANES, UNITS), np.float32), np.full(LANES, STEPS, np.int32)

    def batch(lanes: Any, devices: int) -> Callable[[], Any]:
        """Loops of a layer, whose step takes some microseconds for a lane."""
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("cores",))

        def lane(weights: Any, h: Any, n: Any) -> Any:
            return lx.fori_loop(0, n, lambda _, h: jnp.tanh(weights @ h), h, lanes=lanes)

        program = jax.jit(lambda w, hs, ns: lx.sharded_lanes(partial(lane, w), mesh, "cores")(hs, ns))
        return lambda: jax.block_until_ready(program(weights, starts, counts))

    found = []
    for lanes in ("lockstep", "sequential"):
        times = interleaved([batch(lanes, devices) for devices in (1, cores)], ROUNDS, warm=True)
        found.append(Gain(lanes, *(milliseconds / 1e3 for milliseconds in times)))
    return found


if __name__ == "__main__":
    number = int(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", number)
    print(json.dumps(measured(number)))  # for the process that has asked
