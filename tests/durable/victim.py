"""A durable run in a process of its own, which tests kill: it writes down each step that it takes."""

import hashlib
import os
import struct
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from loopax import durable


def run(directory: str, marks: str, seconds: float, length: int, every: int) -> str:
    """A chaotic map with noise, and outputs; returns a hash of all bits of the results."""
    file = os.open(marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def mark(number):
        os.write(file, struct.pack("q", int(number)))
        time.sleep(seconds)
        return np.asarray(number)

    def step(carry, _, key):
        x, number = carry
        number = jax.pure_callback(mark, jax.ShapeDtypeStruct((), jnp.int32), number)
        x = 3.9 * x * (1 - x) + 1e-3 * jax.random.uniform(key, x.shape)
        x = jnp.clip(x, 0.01, 0.99)
        return (x, number + 1), {"mean": x.mean(), "some": x[:32]}

    init = jnp.linspace(0.1, 0.9, 1 << 16, dtype=jnp.float32), jnp.int32(0)
    (x, number), ys = durable.scan(
        step, init, length=length, key=jax.random.key(7), directory=directory, checkpoint_every=every
    )
    digest = hashlib.sha256()
    for array in (x, number, ys["mean"], ys["some"]):
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def marked(marks: str) -> list[int]:
    """The steps that have been taken, in order, by all processes."""
    with open(marks, "rb") as file:
        data = file.read()
    return [number for (number,) in struct.iter_unpack("q", data[: len(data) // 8 * 8])]


if __name__ == "__main__":
    path, marks, seconds, length, every = sys.argv[1:]
    print(run(path, marks, float(seconds), int(length), int(every)))
