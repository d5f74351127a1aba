"""Gradients of long runs: time beside the gradient in memory, evaluations beside other schedules, memory."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import checkpoint_schedules as theirs
import jax
import jax.numpy as jnp

import loopax as lx
from benchmarks.durable import peak_memory
from benchmarks.groups import Findings
from loopax import durable
from loopax._src.durable.gradient_plan import Choice, _fastest, evaluated
from loopax._src.durable.states import Plan

ROUNDS = 5
SIZE = 10 << 18  # of a carry of 10 MiB
STEPS, CHUNK = 240, 20
ALL = 2**34  # bytes
NAME = "Gradients of long runs"


def tables() -> list[Findings]:
    """All tables."""
    return [
        Findings(
            f"{NAME}: a carry of 10 MiB",
            times,
            f"{STEPS} steps in chunks of {CHUNK}, about 0.2 s each; whole calls of compiled programs, in turn; medians "
            "of five rounds and of their ratios.",
        ),
        Findings(
            f"{NAME}: evaluations",
            evaluations,
            "Of a step, in all: the most of loopax / checkpoint_schedules 1.0.4 for the same states and costs.",
        ),
        Findings(
            f"{NAME}: peak memory",
            memory,
            "The largest resident memory of a process, with memory=4 MiB and a step of about a microsecond.",
        ),
    ]


# ---- time


def step(rate: jax.Array, u: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A nonlinear diffusion."""
    for _ in range(2):
        u = u + rate * jnp.tanh(jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1))
    return u + 1e-3 * x, jnp.vdot(u, u) * 1e-6


def loss(rate: jax.Array, u: jax.Array, total: jax.Array) -> jax.Array:
    return total + u[0] * rate


def times() -> list[dict[str, Any]]:
    given = jnp.float32(0.1), jnp.sin(0.01 * jnp.arange(SIZE)), jnp.sin(0.1 * jnp.arange(float(STEPS)))
    hidden: list[float] = []

    def in_memory(rate: jax.Array, u: jax.Array, xs: jax.Array) -> jax.Array:
        u, ys = lx.scan(lambda u, x: step(rate, u, x), u, xs, kind=lx.Checkpointed())
        return loss(rate, u, ys.sum())

    compiled = jax.jit(jax.value_and_grad(in_memory, (0, 1, 2)))

    def of_long_run(disk: int | None, memory: int) -> Callable[[], Any]:
        def run() -> Any:
            options = {"disk": disk, "memory": memory, "chunk_steps": CHUNK, "kind": lx.Residuals()}
            with tempfile.TemporaryDirectory() as path:
                found, info = durable.value_and_grad(loss, step, directory=path, info=True, **options)(*given)
                if disk is None:
                    hidden.append(info.hidden)
            return found[1].params

        return run

    ways = {
        "in memory, Checkpointed()": lambda: compiled(*given),
        "durable, all states on disk": of_long_run(None, 2**31),
        "durable, all states in memory": of_long_run(0, ALL),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):  # the first one compiles
        for name, way in ways.items():
            begun = time.perf_counter()
            jax.block_until_ready(way())
            found[name].append(time.perf_counter() - begun)
    first, disk, memory = (times[1:] for times in found.values())
    against = [("in memory", first, first, None), ("on disk / in-memory loop", disk, first, 1.10)]
    against += [("in memory / in-memory loop", memory, first, 1.10), ("on disk / in memory", disk, memory, 1.05)]
    rows = []
    for name, times, others, bound in against:
        ratio = median(a / b for a, b in zip(times, others, strict=True))
        rows.append(
            {
                "gradient": name,
                "s": median(times),
                "ratio": ratio,
                "bound": bound,
                "met": bound is None or ratio <= bound,
            }
        )
    share = median(hidden[1:])
    return [*rows, {"gradient": "transfers hidden, on disk", "ratio": share, "bound": 0.8, "met": share >= 0.8}]


# ---- evaluations


def evaluations() -> list[dict[str, Any]]:
    rows = []
    for chunks in (10, 30, 100, 300, 1000, 3000, 10_000):
        ratios = []
        for memory, part, seconds in product((5, 20, 60), (0.1, 0.33, 1.0), (0.0, 0.1, 1.0, 5.0)):
            disk = min(max(round(part * chunks), 1), chunks - 1)
            if memory < chunks and (chunks <= 100 or not seconds):  # H-Revolve takes hours
                ratios.append(_ours(chunks, memory, disk, seconds) / _theirs(chunks, memory, disk, seconds))
        rows.append(
            {"chunks": chunks, "cases": len(ratios), "ratio": max(ratios), "bound": 1.02, "met": max(ratios) <= 1.02}
        )
    return rows


def _ours(chunks: int, memory: int, disk: int, seconds: float) -> int:
    """For transfers of so many times the time of a chunk; the first state is one of those in memory."""
    return evaluated(_fastest(Plan(chunks, 1, disk, memory - 1), Choice(1, "residuals", 1.0, seconds, seconds)))


def _theirs(chunks: int, memory: int, disk: int, seconds: float) -> int:
    costs: Any = seconds, seconds
    if seconds:
        schedule: Any = theirs.HRevolve(chunks, memory, disk, 1, 1, *costs)
    else:
        schedule = theirs.MultistageCheckpointSchedule(chunks, memory, disk)
    total = 0
    for action in schedule:
        if isinstance(action, theirs.EndReverse):
            return total
        if isinstance(action, theirs.Forward):
            total += min(action.n1, chunks) - action.n0
    return total


# ---- memory


def memory() -> list[dict[str, Any]]:
    peaks = {steps: min(_peak(steps) for _ in range(3)) for steps in (10_000, 1_000_000)}
    first = peaks[10_000]
    return [
        {"steps": steps, "peak MiB": peak / 2**10, "ratio": peak / first, "bound": 1.02, "met": peak <= 1.02 * first}
        for steps, peak in peaks.items()
    ]


def _peak(steps: int) -> int:
    """KiB of a process that takes the gradient of so many steps."""
    command = [sys.executable, "-m", "benchmarks.long_gradients", str(steps)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1])


def many_steps(steps: int) -> None:
    """The gradient of so many; prints the peak of this process's memory in KiB."""
    with tempfile.TemporaryDirectory() as path:
        run = durable.value_and_grad(
            lambda rate, x: x.sum(),
            lambda rate, i, x: jnp.sin(rate * x) + 1e-3,
            loop="fori_loop",
            length=steps,
            directory=Path(path) / "run",
            memory=4 << 20,
        )
        jax.block_until_ready(run(jnp.float32(0.9), jnp.ones(64))[0])
    print(peak_memory())


if __name__ == "__main__":
    many_steps(int(sys.argv[1]))
