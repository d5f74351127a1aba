"""Steps that read or write rows of large arrays, under transformations: what a step of the gradient costs."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

import loopax as lx
from benchmarks.groups import Findings
from benchmarks.measure import Case, measure
from benchmarks.reads import READS, WIDTH, WRITES
from benchmarks.sharded import rows_of

LANES = 64
DEVICES = 2
FEW_AND_MANY = 20, 420  # steps
SMALL, LARGE = 64 * 512, 4_000_256  # numbers of an array, or of those of all lanes together

BRANCHES: dict[str, Callable[[Array, Array], Array]] = {
    "a row in a branch of its own": lambda i, xs: lax.cond(
        xs[i, 0] > 0, lambda xs: xs.at[i + 1].set(jnp.sin(xs[i])), lambda xs: xs, xs
    ),
    "a row in a branch of loopax": lambda i, xs: lx.cond(
        xs[i, 0] > 0, lambda xs: xs.at[i + 1].set(jnp.sin(xs[i])), lambda xs: xs, xs
    ),
}
# (arrays, number of the first row, number of steps, their bound) -> a number
Loss = Callable[..., Array]


def losses() -> dict[str, Loss]:
    """A loop of each step that reads, and of each that writes, by what it does."""

    def of_read(read: Any, arrays: Any, first: Array, length: Array, bound: int) -> Array:
        step = lambda c, i: (read(c, i % 10 + first, *arrays), None)
        return lx.scan(step, jnp.ones(WIDTH), jnp.arange(bound, dtype=jnp.int32), length=length)[0].sum()

    def of_write(write: Any, arrays: Any, first: Array, length: Array, bound: int) -> Array:
        step = lambda i, xs: write(i % 10 + first, xs)
        last = lx.fori_loop(0, bound if length is None else length, step, arrays[0], max_steps=bound)
        return last.sum() + 0 * arrays[1].sum()

    reads = {f"read: {name}": partial(of_read, read) for name, read in READS.items() if name != "a table"}
    steps = {**WRITES, **BRANCHES}
    writes = {f"written: {name}": partial(of_write, write) for name, write in steps.items() if "ring" not in name}
    return reads | writes


def _together(arrays: Any, lanes: int | None) -> Any:
    """Arrays of one lane, or those of all."""
    return arrays if lanes is None else jax.tree.map(lambda x: x.reshape(lanes, -1, WIDTH), arrays)


def _batch(loss: Loss, differs: bool, shared: bool, options: Any, bound: int) -> Any:
    firsts = jnp.arange(LANES, dtype=jnp.int32) % 7
    lengths = bound - firsts if differs else None
    axes = None if shared else 0, 0, 0 if differs else None
    of = partial(loss, **options)
    return jax.grad(lambda arrays: jax.vmap(lambda *xs: of(*xs, bound), axes)(arrays, firsts, lengths).sum())


def ways() -> dict[str, tuple[int | None, Callable[[Loss, int], Any]]]:
    """The lanes that have arrays of their own, and the function of the arrays that is measured."""
    one = lambda loss, bound: lambda arrays: loss(arrays, jnp.int32(0), None, bound)

    def twice(loss: Loss, bound: int) -> Any:
        def total(arrays: Any) -> Array:
            outer = lambda i, sum_: sum_ + loss(arrays, i % 3, None, 4)
            return lx.fori_loop(0, bound // 4, outer, jnp.zeros(()))

        return jax.grad(total)

    def forward(loss: Loss, bound: int) -> Any:
        return lambda arrays: jax.jvp(jax.grad(one(loss, bound)), (arrays,), (arrays,))[1]

    def reverse(loss: Loss, bound: int) -> Any:
        rows = lambda arrays: sum((x[:9] ** 2).sum() for x in jax.grad(one(loss, bound))(arrays))
        return jax.grad(rows)

    return {
        "lanes, shared": (None, lambda loss, bound: _batch(loss, False, True, {}, bound)),
        "lanes": (LANES, lambda loss, bound: _batch(loss, False, False, {}, bound)),
        "lanes that stop at different steps": (LANES, lambda loss, bound: _batch(loss, True, False, {}, bound)),
        "a loop in a loop": (None, twice),
        "forward over reverse": (None, forward),
        "reverse over reverse": (None, reverse),
    }


def flatness() -> list[dict[str, Any]]:
    """Microseconds of a step for small and for large arrays: of more steps, less those of fewer."""
    rows = []
    for way, (lanes, made) in ways().items():
        for name, loss in losses().items():
            if "written" in name and way in ("lanes, shared", "a loop in a loop"):
                continue  # each lane has a version of its own; and a loop in a loop would begin again with a copy
            rows.append(_row(name, way, lanes, partial(made, loss)))
    return rows + rows_of("benchmarks.transformed_rows", DEVICES)


def over_devices() -> list[dict[str, Any]]:
    """Lanes on devices of which each has the arrays. Needs so many devices."""
    mesh, firsts = Mesh(np.array(jax.devices()[:DEVICES]), ("d",)), jnp.arange(LANES, dtype=jnp.int32) % 7

    def made(loss: Loss, bound: int) -> Any:
        lanes = lx.sharded_lanes(lambda arrays, first: loss(arrays, first, None, bound), mesh, "d", in_axes=(None, 0))
        return jax.grad(lambda arrays: lanes(arrays, firsts).sum())

    reads = {name: loss for name, loss in losses().items() if "written" not in name}
    way = f"lanes on {DEVICES} devices, shared"
    return [_row(name, way, None, partial(made, loss)) for name, loss in reads.items()]


def _row(step: str, way: str, lanes: int | None, made: Any) -> dict[str, Any]:
    times = {f"us a step, {size} numbers": _step(made, size, lanes) for size in (SMALL, LARGE)}
    return {"step": step, "under": way, **times}


def _step(made: Any, size: int, lanes: int | None) -> float:
    xs = jnp.sin(jnp.arange(size, dtype=jnp.float32)).reshape(-1, WIDTH)
    arrays = _together((xs, 0.5 * xs), lanes)
    cases = [Case(str(bound), made(bound), (arrays,)) for bound in FEW_AND_MANY]
    few, many = (found.milliseconds for found in measure(cases, 7).values())
    return round(1000 * (many - few) / (FEW_AND_MANY[1] - FEW_AND_MANY[0]), 2)


def tables() -> list[Findings]:
    """Small arrays beside large ones."""
    remark = (
        f"Batches are of {LANES} lanes, whose arrays have so many numbers together. To zero cotangents of 4 M numbers "
        "takes milliseconds, and differs by some hundred: 1 us a step."
    )
    return [Findings("Rows of large arrays under transformations, gradient", flatness, remark)]


if __name__ == "__main__":
    print(json.dumps(over_devices()))
