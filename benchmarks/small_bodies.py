"""Loops whose body is two floating-point operations: what a step costs besides the body."""

from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import Array, lax

import loopax as lx
from benchmarks import peers
from benchmarks.groups import Group
from benchmarks.measure import Case
from benchmarks.short.small_loops import Loop, fori_loop, scan, scan_of_checkpoints, step, while_loop
from loopax._src.extras import is_installed

LANES = 64
STEPS = {0: 100_000, LANES: 20_000}  # of one loop, and of a batch
KINDS = [lx.Lax(), lx.Checkpointed(), lx.Bounded(), lx.Residuals()]
DIFFERENTIABLE = [*KINDS[1:], lx.Auto()]


def brainstate_scan(steps: int) -> Loop:
    """Its scan with checkpoints, which needs rows."""
    scan = peers.brainstate_loops().checkpointed_scan
    return lambda rate, y, _: scan(lambda y, _: (step(rate, y), None), y, jnp.arange(steps))[0]


def of_loopax(kinds: list[Any], steps: int) -> dict[str, Loop]:
    """Its three loops, of every kind."""
    bound: Any = {"max_steps": steps, "throw": False}
    programs = {f"loopax while_loop, {kind}": while_loop(lx.while_loop, kind=kind, **bound) for kind in kinds}
    programs |= {f"loopax fori_loop, {kind}": fori_loop(lx.fori_loop, kind=kind, **bound) for kind in kinds}
    return programs | {f"loopax scan, static n, {kind}": scan(lx.scan, length=steps, kind=kind) for kind in kinds}


def forward_programs(steps: int) -> dict[str, Loop]:
    """Without a gradient."""
    programs = {
        "lax.while_loop": while_loop(lax.while_loop),
        "lax.fori_loop": fori_loop(lax.fori_loop),
        "lax.scan, static n": scan(lax.scan, length=steps),
        "Equinox while_loop, lax": while_loop(eqxi.while_loop, kind="lax"),
        "Equinox while_loop, checkpointed": while_loop(eqxi.while_loop, kind="checkpointed", max_steps=steps),
    }
    return programs | of_loopax(KINDS, steps)


def gradient_programs(steps: int) -> dict[str, Loop]:
    """With one."""
    programs = {
        "lax.scan, static n": scan(lax.scan, length=steps),
        "lax.scan of jax.checkpoint, static n": scan(scan_of_checkpoints, length=steps),
        "Equinox while_loop, checkpointed": while_loop(eqxi.while_loop, kind="checkpointed", max_steps=steps),
        "Equinox while_loop, bounded": while_loop(eqxi.while_loop, kind="bounded", max_steps=steps),
    }
    for library, loop in peers.WHILE_LOOPS.items():
        if is_installed(library):
            programs[f"{library} bounded_while_loop"] = while_loop(loop, max_steps=steps)
    if is_installed(peers.BRAINSTATE):
        programs["brainstate checkpointed_scan, static n"] = brainstate_scan(steps)
    return programs | of_loopax(DIFFERENTIABLE, steps)


# ---- tables


def arguments(lanes: int) -> tuple[Array, ...]:
    """The rate, the start and the number of steps; of each lane, where there are some."""
    one = jnp.float32(1e-3), jnp.float32(0.5), jnp.int32(STEPS[lanes])
    return (one[0], *(jnp.full(lanes, x) for x in one[1:])) if lanes else one


def table(lanes: int, differentiated: bool) -> Group:
    """One loop, or a batch in which all take as many steps."""
    steps = STEPS[lanes]
    programs = gradient_programs(steps) if differentiated else forward_programs(steps)

    def summed(program: Loop) -> Loop:
        batched = jax.vmap(program, (None, 0, 0)) if lanes else program
        value = lambda rate, y, n: batched(rate, y, n).sum()
        return jax.grad(value, (0, 1)) if differentiated else value

    cases = [Case(name, summed(program), arguments(lanes)) for name, program in programs.items()]
    what, batch = "gradient" if differentiated else "forward", f"{lanes} lanes, " if lanes else ""
    title = f"Small bodies: two flops, {batch}{what}, n = {steps}"
    return Group(title, cases, [], rounds=15, steps=steps, missing=peers.missing(*peers.WHILE_LOOPS))


def groups() -> list[Group]:
    """All tables."""
    return [table(lanes, differentiated) for lanes in STEPS for differentiated in (False, True)]
