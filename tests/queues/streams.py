"""Functions whose items take different numbers of steps, and the results that are expected of them."""

import jax.numpy as jnp
import numpy as np

import loopax as lx


def collatz(n):
    """Steps to 1, and the largest number on the way."""
    body = lambda at: (jnp.where(at[0] % 2 == 0, at[0] // 2, 3 * at[0] + 1), jnp.maximum(at[0], at[1]), at[2] + 1)
    at = lx.while_loop(lambda at: at[0] != 1, body, (n, n, jnp.int32(0)), max_steps=200)
    return {"steps": at[2], "most": at[1]}


def expected(n):
    steps, most = 0, n
    while n != 1:
        most, n, steps = max(most, n), n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    return steps, most


def items(count):
    return [np.int32(n) for n in range(1, count + 1)]


def found(stream):
    return {index: (int(result["steps"]), int(result["most"])) for index, result in stream}


ANSWERS = {count: {i: expected(i + 1) for i in range(count)} for count in (0, 1, 5, 100)}


def chaotic(item):
    step = lambda i, x: 3.9 * x * (1 - x)
    return lx.fori_loop(0, item["n"], step, item["x"], max_steps=300)


CHAOTIC = [{"n": np.int32(5 + 37 * i % 290), "x": np.float32(0.1 + 0.01 * i)} for i in range(60)]
