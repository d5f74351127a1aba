"""What it costs to show how far a loop is: steps of about a microsecond, beside the same loop without."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import loopax as lx
from benchmarks.groups import Group, Target
from benchmarks.measure import Case
from benchmarks.peers import missing
from loopax._src.extras import is_installed

STEPS, WIDTH = 1_000_000, 64
GRADIENT_STEPS = 300_000
NONE, SHOWN, PEER = "loopax", "loopax, progress=", "lax.scan with jax-tqdm"
TEXT = lx.Progress(style="text")


def step(x: Any) -> Any:
    """A step of about a microsecond."""
    for _ in range(4):
        x = jnp.sin(x) * 1.1 + 0.1
    return x


def counted(progress: lx.Progress | None) -> Callable[..., Any]:
    """A number of steps that is known when the loop starts."""
    return lambda x, n: lx.fori_loop(0, n, lambda _, x: step(x), x, progress=progress)


def conditional(progress: lx.Progress | None) -> Callable[..., Any]:
    """A number of steps that a condition decides, without a bound."""

    def run(x: Any, n: Any) -> Any:
        return lx.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (0, x), progress=progress)

    return run


def saving(progress: lx.Progress | None) -> Callable[..., Any]:
    """The gradient of a loop with a bound: its forward pass saves a carry now and then."""

    def value(x: Any, n: Any) -> Any:
        kind = lx.Checkpointed()
        return lx.fori_loop(0, n, lambda _, x: step(x), x, max_steps=GRADIENT_STEPS, kind=kind, progress=progress).sum()

    return jax.grad(value)


def with_peer(x: Any, n: Any) -> Any:
    """`lax.scan` with the bar of jax-tqdm, which asks in each step whether to call."""
    from jax_tqdm import scan_tqdm  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

    del n
    body = scan_tqdm(STEPS)(lambda x, _: (step(x), None))
    return jax.lax.scan(body, x, jnp.arange(STEPS))[0]


def group(title: str, steps: int, program: Callable[..., Any], peers: dict[str, Any] | None = None) -> Group:
    """A loop that shows how far it is, beside the same one that does not."""
    arguments = jnp.linspace(0.0, 1.0, WIDTH, dtype=jnp.float32), jnp.int32(steps)
    programs = {NONE: program(None), SHOWN: program(TEXT), **(peers or {})}
    cases = [Case(name, f, arguments) for name, f in programs.items()]
    return Group(
        f"Progress: {title}, {steps} steps of a microsecond",
        cases,
        [Target("time", SHOWN, NONE, 1.03)],
        rounds=9,
        missing=missing("jax_tqdm"),
    )


def groups() -> list[Group]:
    """All tables."""
    peers = {PEER: with_peer} if is_installed("jax_tqdm") else {}
    return [
        group("a known number", STEPS, counted, peers),
        group("until a condition", STEPS, conditional),
        group("gradient", GRADIENT_STEPS, saving),
    ]
