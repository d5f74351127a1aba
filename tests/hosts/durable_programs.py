"""A durable run of several processes, and of one alone for comparison."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from loopax import durable
from tests.hosts.programs import mesh_of, shards

SIZE = 1 << 15
EVERY = 100


def results(devices: Any, directory: str, steps: int) -> dict[str, Any]:
    """A chaotic map of a carry that is spread over all devices, a count that is not, and outputs on disk."""
    spread = NamedSharding(mesh_of(devices), PartitionSpec("d"))
    values = np.linspace(0.1, 0.9, SIZE)
    start = jax.make_array_from_callback((SIZE,), spread, lambda index: values[index])

    def step(carry: Any, _: Any, key: Any) -> tuple[Any, Any]:
        x, number = carry
        for _ in range(4):
            x = 3.9 * x * (1 - x)
        x = jnp.clip(x + 1e-3 * jax.random.uniform(key), 0.01, 0.99)
        return (x, number + 1), {"number": number, "some": x[:8]}

    carry, ys = durable.scan(
        step, (start, 0), length=steps, key=jax.random.key(3), directory=directory, checkpoint_every=EVERY
    )
    return {"carry": carry, "rows": {name: jnp.asarray(np.asarray(rows)) for name, rows in ys.items()}}


def show(directory: str, steps: str) -> None:
    """What each process does: one line with its shards."""
    print("shards: " + json.dumps(shards(results(jax.devices(), directory, int(steps)))))
