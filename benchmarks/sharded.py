"""Lanes spread over eight virtual devices: what the busiest device does, and what the devices do together.

Step work of a device: the sum of the steps of its lanes. Evaluations of a device: how often it evaluates the body,
times the lanes of the batch in which it does, counted as the program runs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import loopax as lx
from benchmarks.groups import Findings

DEVICES, LANES, TARGET = 8, 256, 1.15
REMARK = (
    f"{LANES} lanes on {DEVICES} virtual CPU devices, with log-normal counts (sigma = 1). Step work of a device: the "
    "sum of the steps of its lanes. Evaluations of a device: how often it evaluates the body, times the lanes of the "
    "batch in which it does, counted as the program runs. The target is for the step work of the busiest device over "
    "the mean, where lanes are assigned by their counts."
)


class DeviceCounter:
    """Counts the lanes that each device evaluates, when the program runs."""

    def __init__(self) -> None:
        """Nothing counted."""
        self.evaluations, self._lock = np.zeros(DEVICES, int), Lock()

    def __call__(self, x: Any) -> Any:
        """The identity on a number of a lane, in a device's own program."""
        shape = jax.ShapeDtypeStruct((), x.dtype)
        return jax.pure_callback(self._count, shape, x, jax.lax.axis_index("d"), vmap_method="expand_dims")

    def _count(self, x: Any, device: Any) -> Any:
        with self._lock:
            self.evaluations[int(np.asarray(device).reshape(-1)[0])] += x.size
        return x


def counts() -> np.ndarray:
    """The steps of all lanes."""
    return np.ceil(20 * np.random.RandomState(0).lognormal(sigma=1.0, size=LANES)).astype(np.int32)


def evaluations(lanes: lx.Lanes, body: Callable[[Any], Any], is_assigned: bool) -> np.ndarray:
    """What each device evaluates of a loop whose carry counts its steps."""
    counter, steps = DeviceCounter(), counts()
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
    lane = lambda n: lx.fori_loop(0, n, lambda _, x: body(counter(x)), jnp.float32(0.0), lanes=lanes)
    run = jax.jit(lambda n: lx.sharded_lanes(lane, mesh, "d")(n, counts=steps if is_assigned else None))
    assert (np.asarray(run(steps)) == steps).all()
    return counter.evaluations


def step_work(is_assigned: bool) -> np.ndarray:
    """The steps of the lanes of each device: a loop on each that adds those of its own up."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
    place = lambda n: jax.lax.axis_index("d").astype(jnp.int32)
    steps = counts()
    where = jax.jit(lambda n: lx.sharded_lanes(place, mesh, "d")(n, counts=steps if is_assigned else None))(steps)
    return np.bincount(np.asarray(where), weights=steps, minlength=DEVICES)


def measured() -> list[dict[str, Any]]:
    """A row for each way to deal and to run the lanes. Needs as many devices."""
    rows, useful = [], int(counts().sum())
    for is_assigned in (False, True):
        work = step_work(is_assigned)
        for lanes in (lx.Lockstep(), lx.Compact(min_lanes=4), lx.Compact(min_lanes=1)):
            found = evaluations(lanes, lambda x: x + 1.0, is_assigned)
            busiest = work.max() / work.mean()
            rows.append(
                {
                    "lanes": str(lanes),
                    "assigned by counts": "yes" if is_assigned else "no",
                    "step work, busiest / mean": busiest,
                    "evaluations, busiest / mean": found.max() / found.mean(),
                    "evaluations of the busiest device": float(found.max()),
                    "useful evaluations": useful / found.sum(),
                    f"at most {TARGET}": bool(busiest <= TARGET) if is_assigned else None,
                }
            )
    return rows


@cache
def rows_of(module: str, devices: int) -> list[dict[str, Any]]:
    """What a module prints in a process of its own, which has so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def tables() -> list[Findings]:
    """One table."""
    fewer = ("step work, busiest / mean", "evaluations of the busiest device")
    return [Findings("Sharded lanes: eight devices", partial(rows_of, "benchmarks.sharded", DEVICES), REMARK, fewer)]


if __name__ == "__main__":
    print(json.dumps(measured()))
