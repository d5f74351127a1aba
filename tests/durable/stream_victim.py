"""A stream of items from a slow source, saved ten times a second: it is killed, and started again."""

import sys
import time
from hashlib import sha256

import jax
import numpy as np

import loopax as lx
from loopax import durable

ITEMS = 3000


def chaotic(item):
    """As many steps as the item says, from a place that its key says."""
    x = jax.random.uniform(jax.random.key(item["seed"]), (3,))
    last = lx.fori_loop(0, item["steps"], lambda _, x: 3.9 * x * (1 - x), x, max_steps=200)
    return {"last": last, "steps": item["steps"]}


def items(marks):
    """Every item of the run; what is fetched leaves a mark."""
    for i in range(ITEMS):
        time.sleep(0.0003)
        with open(marks, "a") as file:
            file.write("x")
        yield {"seed": np.uint32(i), "steps": np.int32(1 + i * 37 % 190)}


if __name__ == "__main__":
    directory, marks = sys.argv[1:]
    found = durable.lanes_stream(
        chaotic, items(marks), directory=directory, num_lanes=16, checkpoint_every=0.1, chunk_steps=100
    )
    order = np.argsort(found.items)
    assert np.asarray(found.items)[order].tolist() == list(range(ITEMS))
    parts = [found.items, found.results["last"], found.results["steps"]]
    print(sha256(b"".join(np.asarray(rows)[order].tobytes() for rows in parts)).hexdigest())
