"""The programs whose interrupted runs are stored in `tests/durable/stored`: never to be changed, only added to.

`python -m tests.durable.stored_programs DIRECTORY` makes them; archives of them stand there. `format1` was written by
the last version of loopax that recognised a program by JAX's text of it, under JAX 0.10.2.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import loopax as lx
from loopax import durable
from tests.durable.cases import Steps, stopped

X = np.array([1.0, -0.5, 2.0])
XS = np.arange(36.0).reshape(12, 3) / 7
TABLE = np.arange(3.0)
OFTEN: dict[str, Any] = {"checkpoint_every": 4, "chunk_steps": 2, "keep": 1}


def outputs(directory: Any, steps: Steps, **options: Any) -> Any:
    """A scan with rows of xs, a key and outputs."""

    def f(c: Any, x: Any, key: Any) -> Any:
        h, n = c
        steps.at(n)
        h = jnp.where(h > 1, h * 0.5, jnp.sin(h) * 1.5) + x + jax.random.uniform(key, (3,))
        return (h, n + 1), {"h": h.sum().astype(jnp.float32), "n": n.astype(jnp.int8)}

    return durable.scan(f, (X, 0), XS, key=jax.random.key(0), directory=directory, **OFTEN, **options)


def loops(directory: Any, steps: Steps, **options: Any) -> Any:
    """Loops of loopax and of JAX in the body, with a derivative and lanes."""
    w = jnp.eye(3) * 0.5

    def inner(x: Any, n: Any) -> Any:
        x = lx.fori_loop(
            0, n, lambda j, x: jnp.sin(w @ x) + TABLE * j.astype(float), x, max_steps=4, kind="checkpointed"
        )
        x = lx.while_loop(lambda x: x[0] < 2, lambda x: x + 0.5, x, max_steps=9)
        x, ys = lx.scan(lambda c, y: (c * 0.9 + y, c), x, jnp.stack([x, x]), kind="checkpointed")
        return x + ys.sum(0)

    def body(i: Any, x: Any) -> Any:
        steps.at(i)
        n = (i % jnp.asarray(3, i.dtype) + jnp.asarray(1, i.dtype)).astype(jnp.int32)
        x = jax.lax.fori_loop(0, n, lambda _, x: x * 0.5, inner(x, n))
        x = jax.lax.cond(x[0] > 0, jnp.cos, jnp.tanh, x)
        x = x + 0.01 * jax.grad(lambda x: inner(x, n).sum())(x)
        lanes = jax.vmap(lambda x, n: lx.fori_loop(0, n, lambda _, x: x * 0.7, x, max_steps=5))
        return lanes(x, jnp.arange(3, dtype=jnp.int32) + n)

    return durable.fori_loop(0, 12, body, X, directory=directory, **OFTEN, **options)


def calls(directory: Any, steps: Steps, **options: Any) -> Any:
    """Functions of Python in the body, and a condition."""
    shape = jax.ShapeDtypeStruct((3,), jnp.float64)

    def work(x: Any) -> Any:
        return np.sin(x) * 1.5

    def body(c: Any) -> Any:
        steps.at(c[1])
        return jax.pure_callback(work, shape, c[0]) + 0.1, c[1] + 1

    return durable.while_loop(lambda c: c[1] < 12, body, (X, 0), directory=directory, **OFTEN, **options)


PROGRAMS: dict[str, Callable[..., Any]] = {"outputs": outputs, "loops": loops, "calls": calls}


def main(directory: str) -> None:
    """Store each program's run, interrupted at its tenth step."""
    for name, run in PROGRAMS.items():

        def interrupted(run: Any = run, name: str = name) -> None:
            run(Path(directory) / name, Steps(9))
            jax.effects_barrier()

        stopped(interrupted)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(sys.argv[1])
