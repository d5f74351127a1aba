"""Seconds before the first step: what it takes to trace, lower and compile a loop and its derivatives."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax

import loopax as lx
from benchmarks.groups import Findings

STEPS, ROUNDS, LANES = 1000, 5, 1024
X = jnp.ones(8)
Function = Callable[..., Any]


def step(x: Any) -> Any:
    return jnp.sin(x) * 1.1


def large_step(x: Any) -> Any:
    """Of 960 equations with two inner loops."""
    for _ in range(240):
        x = jnp.sin(x) * 1.01 + x * 0.1
    for _ in range(2):
        x = lx.fori_loop(0, 3, lambda _, x: x * 0.9 + jnp.cos(x), x)
    return x


def scan(loop: Any, body: Any = step, **options: Any) -> Function:
    return lambda x: loop(lambda x, _: (body(x), None), x, None, length=STEPS, **options)[0].sum()


def while_loop(loop: Any, **options: Any) -> Function:
    return lambda x: loop(lambda c: c[0] < STEPS, lambda c: (c[0] + 1, step(c[1])), (0, x), **options)[1].sum()


def lanes(how: Any) -> Function:
    """A small network, by which lanes take different numbers of steps."""
    weights, counts = (jnp.ones((8, 32)) / 8, jnp.ones((32, 8)) / 32), jnp.arange(LANES)

    def lane(x: Any, n: Any) -> Any:
        body = lambda c: (c[0] + 1, c[1] + 0.1 * jnp.tanh(c[1] @ weights[0]) @ weights[1])
        return lx.while_loop(lambda c: c[0] < n, body, (0, x), lanes=how, max_steps=STEPS)[1]

    return lambda x: jax.vmap(lane, (None, 0))(x, counts).sum()


CHECKPOINTED: Any = {"kind": "checkpointed"}
LAX_SCAN, LAX_WHILE = scan(lax.scan), while_loop(lax.while_loop)
# What is done, and with which loops: lax, loopax, Equinox.
PROGRAMS: dict[str, tuple[Function, Function | None, Function, Function | None]] = {
    "scan": (lambda f: f, LAX_SCAN, scan(lx.scan), scan(eqxi.scan, kind="lax")),
    "gradient of a scan": (jax.grad, LAX_SCAN, scan(lx.scan), scan(eqxi.scan, **CHECKPOINTED)),
    "gradient of a scan, Checkpointed()": (jax.grad, None, scan(lx.scan, kind=lx.Checkpointed()), None),
    "gradient of a while_loop, max_steps": (
        jax.grad,
        None,
        while_loop(lx.while_loop, max_steps=STEPS),
        while_loop(eqxi.while_loop, max_steps=STEPS, **CHECKPOINTED),
    ),
    "gradient of a while_loop": (
        jax.grad,
        None,
        while_loop(lx.while_loop),
        while_loop(eqxi.while_loop, checkpoints=64, **CHECKPOINTED),
    ),
    "hessian of a while_loop": (
        jax.hessian,
        None,
        while_loop(lx.while_loop),
        while_loop(eqxi.while_loop, checkpoints=64, **CHECKPOINTED),
    ),
    "1024 lanes in lockstep": (lambda f: f, None, lanes("lockstep"), None),
    "1024 lanes, compact": (lambda f: f, None, lanes("compact"), None),
    "1024 lanes, compact, gradient": (jax.grad, None, lanes("compact"), None),
    "scan, 960 equations": (lambda f: f, scan(lax.scan, large_step), scan(lx.scan, large_step), None),
    "gradient of it": (jax.grad, scan(lax.scan, large_step), scan(lx.scan, large_step), None),
}


def compiled(transformation: Function, function: Function | None) -> tuple[float, int] | None:
    """Milliseconds from the function to the compiled program, and the loops in it."""
    if function is None:
        return None
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(transformation(partial(function))).lower(X)  # a new function, which is traced again
    lowered.compile()
    return 1e3 * (time.perf_counter() - start), lowered.as_text().count("stablehlo.while")


def compile_times() -> list[dict[str, Any]]:
    """Of all programs, in turn."""
    rows = []
    for name, (transformation, *functions) in PROGRAMS.items():
        # Once before: libraries import some of their parts at first use. What takes a minute is compiled once again.
        before = compiled(transformation, functions[1])
        rounds = 1 if before and before[0] > 60e3 else ROUNDS
        found = [[compiled(transformation, f) for f in functions] for _ in range(rounds)]
        by_library = dict(zip(("lax", "loopax", "Equinox"), zip(*found, strict=True), strict=True))
        times = {n: round(median(t[0] for t in ts if t)) if ts[0] else "-" for n, ts in by_library.items()}
        loops = found[0][1] or (0, 0)
        rows.append({"program": name, "loops": loops[1], **{f"{n}, ms": t for n, t in times.items()}})
    return rows


# Loops outside of `jax.jit` that are given new functions of the same code in each call.
EAGER: dict[str, Callable[[], tuple[Any, Any]]] = {
    "while_loop": lambda: (while_loop(lax.while_loop), while_loop(lx.while_loop)),
    "scan": lambda: (scan(lax.scan), scan(lx.scan)),
    "gradient of a scan": lambda: (jax.grad(scan(lax.scan)), jax.grad(scan(lx.scan))),
    "gradient of a while_loop": lambda: (None, jax.grad(while_loop(lx.while_loop))),
    "hessian of a scan": lambda: (jax.hessian(scan(lax.scan)), jax.hessian(scan(lx.scan))),
}


def eager_times() -> list[dict[str, Any]]:
    """Milliseconds of a first and a second call."""
    rows = []
    for name, made in EAGER.items():
        row: dict[str, Any] = {"program": name}
        for which, library in enumerate(("lax", "loopax")):
            jax.clear_caches()
            times = []
            for _ in range(1 + ROUNDS):
                if (function := made()[which]) is None:
                    break
                start = time.perf_counter()
                jax.block_until_ready(function(X))
                times.append(1e3 * (time.perf_counter() - start))
            first, again = (times[0], median(times[1:])) if times else ("-", "-")
            row |= {f"{library}, first": _rounded(first), f"{library}, again": _rounded(again)}
        rows.append(row)
    return rows


def _rounded(milliseconds: Any) -> Any:
    return milliseconds if isinstance(milliseconds, str) else round(milliseconds, 1)


def nested(levels: int, bound: int | None, kind: Any) -> Function:
    """As many loops, each in the body of another one, around an arc tangent."""

    def run(x: Any, level: int) -> Any:
        if not level:
            return jnp.arctan(x)
        return lx.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, run(c[1], level - 1)), (0, x), max_steps=bound, kind=kind
        )[1]

    return lambda x: run(x, levels).sum()


ORDERS: dict[str, Function] = {
    "value": lambda f: f,
    "gradient": jax.grad,
    "gradient twice": lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
}


def copies() -> list[dict[str, Any]]:
    """How often the innermost body stands in a program; the loops of the program behind it."""
    rows = []
    for name, bound, kind in (
        ("residuals", 3, lx.Residuals()),
        ("bounded", 3, lx.Bounded()),
        ("checkpointed, max_steps", 3, lx.Checkpointed()),
        ("checkpointed", None, lx.Checkpointed()),
    ):
        for order, derivative in ORDERS.items():
            row: dict[str, Any] = {"kind": name, "program": order}
            for levels in range(1, 5):
                text = jax.jit(derivative(nested(levels, bound, kind))).lower(X).as_text()
                row[f"{levels} loops"] = f"{text.count('chlo.atan')} ({text.count('stablehlo.while')})"
            rows.append(row)
    return rows


def tables() -> list[Findings]:
    """The tables."""
    remark = (
        "Milliseconds to trace, lower and compile, the median of five, or one of more than a minute; `loops` are "
        "loopax's in the program."
    )
    again = "Milliseconds of a call outside of `jax.jit`, whose body is a new lambda each time."
    return [
        Findings("Seconds before the first step", compile_times, remark, counts=("loops",)),
        Findings("Seconds before the first step, new lambdas", eager_times, again),
        Findings(
            "Seconds before the first step, copies of the innermost body",
            copies,
            "Of loops in one another: how often the body of the innermost one stands in the program, and, in brackets, "
            "how many loops the program has.",
        ),
    ]
