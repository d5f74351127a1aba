"""Steps that read or write a few elements of large arrays: what the gradient with respect to these arrays costs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import Array, lax

import loopax as lx
from benchmarks.groups import EQUINOX, LAX_SCAN, Findings, Group, Target
from benchmarks.measure import Case, measure

WIDTH, ROWS, STEPS = 8, 4004, 4000
SMALL_ROWS, LARGE_ROWS, FEW_AND_MANY = 4100, 500_000, (200, 4000)  # 33 thousand numbers, and 4 million

DEFAULT, CHECKPOINTED, TRACED = "loopax scan", "loopax scan, Checkpointed()", "loopax scan, traced length"
# (step, carry, rows, number of them) -> the last carry
Scan = Callable[..., Any]
SCANS: dict[str, Scan] = {
    LAX_SCAN: lambda step, c, xs, n: lax.scan(step, c, xs)[0],
    DEFAULT: lambda step, c, xs, n: lx.scan(step, c, xs)[0],
    CHECKPOINTED: lambda step, c, xs, n: lx.scan(step, c, xs, kind="checkpointed")[0],
    TRACED: lambda step, c, xs, n: lx.scan(step, c, xs, length=n)[0],
    EQUINOX: lambda step, c, xs, n: eqxi.scan(step, c, xs, kind="checkpointed")[0],
}
READS: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "one row": lambda c, i, xs, us: jnp.sin(c) + xs[i],
    "two rows": lambda c, i, xs, us: jnp.sin(c) * xs[i] + xs[i + 1],
    "a table": lambda c, i, xs, us: c + jnp.interp(c, jnp.arange(xs.shape[0], dtype=c.dtype), xs[:, 0]),
    "a row in a branch": lambda c, i, xs, us: jnp.sin(c) + lax.cond(i % 2 == 0, lambda: xs[i], lambda: us[i]),
    "rows in an inner scan": lambda c, i, xs, us: lax.scan(
        lambda c, j: (jnp.sin(c) + xs[i + j], None), c, jnp.arange(2)
    )[0],
    "rows in an inner loop": lambda c, i, xs, us: lx.fori_loop(0, 2, lambda j, c: jnp.sin(c) + xs[i + j], c),
    "three rows at once": lambda c, i, xs, us: jnp.sin(c) + xs[jnp.stack([i, i + 1, i + 3])].sum(0),
}
# Bounds beside `lax.scan`: of the default, and of `Checkpointed()`.
BOUNDS = {"one row": (1.5, 3.0), "two rows": (1.5, 3.0)}
IN_BRANCHES_AND_LOOPS = 1 / 10


def gradient(read: Any, scan: Scan, steps: int) -> Any:
    """The gradient with respect to the arrays that are read."""

    def loss(arrays: tuple[Array, Array], n: Array) -> Array:
        step = lambda c, i: (read(c, i, *arrays), None)
        return scan(step, jnp.ones(WIDTH), jnp.arange(steps, dtype=jnp.int32), n).sum()

    return jax.grad(loss)


def arrays(rows: int) -> tuple[Array, Array]:
    """Two of them."""
    xs = jnp.sin(jnp.arange(rows * WIDTH, dtype=jnp.float32)).reshape(rows, WIDTH)
    return xs, 0.5 * xs


def groups() -> list[Group]:
    """Each read, in each loop."""
    found = wholes()
    for name, read in READS.items():
        default, checkpointed = BOUNDS.get(name, (1.5, 3.0) if "at once" in name else (IN_BRANCHES_AND_LOOPS,) * 2)
        default, checkpointed = (1.0, 1.0) if name == "a table" else (default, checkpointed)
        given = arrays(ROWS), jnp.int32(STEPS)
        found.append(
            Group(
                f"Reads: {name} of {ROWS} in each of {STEPS} steps, gradient",
                [Case(of, gradient(read, scan, STEPS), given) for of, scan in SCANS.items()],
                [
                    Target("time", DEFAULT, LAX_SCAN, default),
                    Target("time", CHECKPOINTED, LAX_SCAN, checkpointed),
                    Target("time", DEFAULT, EQUINOX, 0.5),
                ],
                rounds=5,
            )
        )
    return found


OF_KINDS = {
    "default": {},
    "Residuals()": {"kind": "residuals"},
    "Bounded()": {"kind": "bounded"},
    "Checkpointed()": {"kind": "checkpointed"},
    "Truncated(last=100)": {"derivative": lx.Truncated(last=100)},
}


def flatness() -> list[dict[str, Any]]:
    """Microseconds of a step for small and for large arrays: of more steps, less those of fewer."""
    rows = []
    for name, read in READS.items():
        for kind, options in OF_KINDS.items():
            scan = partial(lambda step, c, xs, n, options: lx.scan(step, c, xs, **options)[0], options=options)
            times = {f"us a step, {size * WIDTH} numbers": _step(read, scan, size) for size in (SMALL_ROWS, LARGE_ROWS)}
            rows.append({"read": name, "kind": kind, **times})
    return rows


def _step(read: Any, scan: Scan, size: int) -> float:
    cases = [Case(str(n), gradient(read, scan, n), (arrays(size), jnp.int32(n))) for n in FEW_AND_MANY]
    few, many = (found.milliseconds for found in measure(cases, 5).values())
    return round(1000 * (many - few) / (FEW_AND_MANY[1] - FEW_AND_MANY[0]), 2)


# What a step makes of an array in the carry, of which it writes rows.
WRITES: dict[str, Callable[[Array, Array], Array]] = {
    "a row from the one before": lambda i, xs: xs.at[i + 1].set(jnp.sin(xs[i])),
    "a row from its neighbours": lambda i, xs: xs.at[i + 1].set(jnp.sin(xs[i + 1]) + 0.5 * jnp.cos(xs[i]) * xs[i + 2]),
    "two rows from each other": lambda i, xs: xs.at[i].set(xs[2 * i]).at[2 * i].set(jnp.sin(xs[i])),
    "a row of two, in a ring": lambda i, xs: xs.at[i % 100].set(jnp.sin(xs[(i + 1) % 100]) * xs[(i + 2) % 100]),
    "an element": lambda i, xs: xs.at[i + 1, 3].set(jnp.sin(xs[i, 3]) + xs[i, 2]),
    "a row in a branch": lambda i, xs: lax.cond(
        i % 2 == 0, lambda xs: xs.at[i + 1].set(jnp.sin(xs[i])), lambda xs: xs, xs
    ),
    "rows in an inner loop": lambda i, xs: lax.fori_loop(
        0, 2, lambda j, xs: xs.at[i + j + 1].set(jnp.sin(xs[i + j])), xs
    ),
}


def flatness_of_writes() -> list[dict[str, Any]]:
    """As of reads."""
    return [
        {"written": name, "loop": kind}
        | {
            f"us a step, {size * WIDTH} numbers": _step_of_writes(write, options, size)
            for size in (SMALL_ROWS, LARGE_ROWS)
        }
        for name, write in WRITES.items()
        for kind, options in {"lax.fori_loop": None, **OF_KINDS}.items()
        if "derivative" not in (options or {})
    ]


def _step_of_writes(write: Any, options: dict[str, Any] | None, size: int) -> float:
    def gradient(steps: int) -> Any:
        loop = lax.fori_loop if options is None else partial(lx.fori_loop, **options)
        return jax.grad(lambda xs: loop(0, steps, write, xs).sum())

    few_and_many = (20, 60) if options is None else (100, 2000)
    cases = [Case(str(n), gradient(n), (arrays(size)[0],)) for n in few_and_many]
    few, many = (found.milliseconds for found in measure(cases, 5).values())
    return round(1000 * (many - few) / (few_and_many[1] - few_and_many[0]), 2)


BY_INDEX, BY_ROWS, TWO_TABLES = "loopax fori_loop, by index", "loopax scan over rows", "loopax scan"


def wholes() -> list[Group]:
    """A field that is swept row by row, and an embedding."""

    def by_index(loop: Any) -> Any:
        def loss(k: Array, field: Array) -> Array:
            step = lambda i, u: u.at[i].set(u[i] + k * jnp.sin(u[i - 1]) * u[i])
            return (loop(1, field.shape[0], step, field) ** 2).sum()

        return jax.grad(loss, (0, 1))

    def by_rows(k: Array, field: Array) -> Array:
        def step(before: Array, row: Array) -> tuple[Array, Array]:
            new = row + k * jnp.sin(before) * row
            return new, new

        return (lx.scan(step, field[0], field[1:])[1] ** 2).sum() + (field[0] ** 2).sum()

    def embedding(scan: Any) -> Any:
        def loss(tables: tuple[Array, Array], weights: Array, tokens: Array) -> Array:
            step = lambda h, t: (jnp.tanh(tables[0][t] + h @ weights) * tables[1][t], None)
            return (scan(step, jnp.ones(64), tokens)[0] ** 2).mean()

        return jax.grad(loss)

    keys = jax.random.split(jax.random.key(0), 4)
    tables = tuple(jax.random.normal(key, (50_000, 64)) for key in keys[:2])
    weights, tokens = 0.1 * jax.random.normal(keys[2], (64, 64)), jax.random.randint(keys[3], (400,), 0, 50_000)
    field = jnp.float32(0.1), jax.random.normal(keys[0], (96, 96, 400))
    loops = {BY_INDEX: lx.fori_loop, "lax.fori_loop, by index": lax.fori_loop}
    return [
        Group(
            "Writes: a field of 96 x 96 x 400 swept by index, gradient",
            [
                *(Case(of, by_index(loop), field) for of, loop in loops.items()),
                Case(BY_ROWS, jax.grad(by_rows, (0, 1)), field),
            ],
            [Target("time", BY_INDEX, BY_ROWS, 1.2)],
            rounds=5,
        ),
        Group(
            "Reads: two tables of 50 000 x 64 for 400 tokens, gradient",
            [
                Case(of, embedding(scan), (tables, weights, tokens))
                for of, scan in {LAX_SCAN: lax.scan, TWO_TABLES: lx.scan}.items()
            ],
            [Target("time", TWO_TABLES, LAX_SCAN, 1.1)],
        ),
    ]


def tables() -> list[Findings]:
    """Small arrays beside large ones."""
    remark = "Memory is farther away than a cache: 0.2 us a step, or half as much again, are no growth."
    return [
        Findings("Reads: a step of the gradient, as the arrays grow", flatness, remark),
        Findings("Writes: a step of the gradient, as the array grows", flatness_of_writes, remark),
    ]
