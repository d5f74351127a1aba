"""Steps that read a few elements of large arrays: what the gradient with respect to these arrays costs."""

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
SMALL_ROWS, LARGE_ROWS, FEW_AND_MANY = 512, 500_000, (200, 1200)  # 4 thousand numbers, and 4 million

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
    found = []
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


def tables() -> list[Findings]:
    """Small arrays beside large ones."""
    remark = "Memory is farther away than a cache: 0.2 us a step, or half as much again, are no growth."
    return [Findings("Reads: a step of the gradient, as the arrays grow", flatness, remark)]
