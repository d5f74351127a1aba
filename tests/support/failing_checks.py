"""Checks that fail in programs for eight devices.

A program of its own, for `test_sharding.py`: JAX keeps what failed on several devices, and raises it again
wherever the same process waits for effects.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import loopax as lx

MESH = Mesh(np.array(jax.devices()), ("d",))


def lanes(x: Any, counts: Any) -> Any:
    lane = lambda n, x: lx.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.1), (0, x), max_steps=5)
    return lx.sharded_lanes(lane, MESH, "d", in_axes=(0, None))(counts, x, counts=counts)[1].sum()


def carry(h: Any, _: Any) -> Any:
    return lx.while_loop(lambda h: h.sum() < 100, lambda h: h * 1.1, h, max_steps=5).sum()


def report(name: str, f: Callable[..., Any], *args: Any) -> None:
    """Print the result, or the error."""
    try:
        print(name, float(jax.block_until_ready(f(*args))))
    except eqx.EquinoxRuntimeError as error:
        print(name, "raised" if "max_steps=5 stopped a loop" in str(error) else error)


def main() -> None:
    few, many = jnp.arange(6), jnp.array([1, 2, 9, 0, 3, 4])
    for counts in (few, many):
        report("lanes", lanes, 1.0, counts)
        report("lanes in jit", eqx.filter_jit(lanes), 1.0, counts)
        report("gradient of lanes", jax.grad(lanes), 1.0, counts)
        report("gradient of lanes in jit", eqx.filter_jit(jax.grad(lanes)), 1.0, counts)
    for size in (80.0, 1.0):
        h = jax.device_put(jnp.full(8, size / 8), NamedSharding(MESH, PartitionSpec("d")))
        report("carry", carry, h, None)
        with jax.set_mesh(MESH):
            report("carry in jit", eqx.filter_jit(carry), h, None)


if __name__ == "__main__":
    main()
