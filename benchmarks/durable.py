"""Durable loops: what chunks and saves cost, and outputs larger than memory."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import loopax as lx
from benchmarks.groups import Findings
from loopax import durable

ROUNDS = 5
NEVER = 1e9  # seconds between saves


def tables() -> list[Findings]:
    """All tables."""
    return [
        Findings(
            "Durable loops: chunks",
            chunks,
            "Per step, from the difference of runs of two lengths; in turn, medians of five rounds and of the ratios.",
        ),
        Findings(
            "Durable loops: saves of a state of 10 MiB",
            saves,
            "Runs of about 12 s, in turn; medians of five rounds and of their ratios.",
        ),
        Findings("Durable loops: outputs larger than memory", outputs, "The largest resident memory of the process."),
    ]


def milliseconds(run: Callable[[Path], Any]) -> float:
    """Of a run in a directory of its own."""
    with tempfile.TemporaryDirectory() as path:
        begin = time.perf_counter()
        jax.block_until_ready(run(Path(path) / "run"))
        return 1e3 * (time.perf_counter() - begin)


# ---- chunks


def step_of_ten_microseconds(_: Any, x: jax.Array) -> jax.Array:
    for _ in range(6):
        x = jnp.sin(x) * 1.1 + 0.1
    return x


def chunks() -> list[dict[str, Any]]:
    init = jnp.linspace(0.0, 1.0, 512, dtype=jnp.float32)
    plain = jax.jit(lambda n, x: lx.fori_loop(0, n, step_of_ten_microseconds, x))

    def with_chunks(chunk_steps: int | None) -> Callable[[int], Callable[[Path], Any]]:
        return lambda n: (
            lambda path: durable.fori_loop(
                0, n, step_of_ten_microseconds, init, directory=path, checkpoint_every=NEVER, chunk_steps=chunk_steps
            )
        )

    ways: dict[str, Callable[[int], Callable[[Path], Any]]] = {
        "one loop, loopax.fori_loop": lambda n: lambda _: plain(n, init),
        "durable, 1000 steps a chunk": with_chunks(1000),
        "durable, chunks of 0.2 s": with_chunks(None),
    }
    short, long = 20_000, 320_000
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):  # the first one compiles
        for name, way in ways.items():
            found[name].append(1e3 * (milliseconds(way(long)) - milliseconds(way(short))) / (long - short))
    return compared({name: times[1:] for name, times in found.items()}, "us per step", 1.02)


def compared(found: dict[str, list[float]], unit: str, bound: float) -> list[dict[str, Any]]:
    """Medians, and the median of the ratios to the first program in the same round."""
    first = next(iter(found.values()))
    ratios = {name: median(a / b for a, b in zip(times, first, strict=True)) for name, times in found.items()}
    return [
        {"program": name, unit: median(times), "ratio": ratios[name], "bound": bound, "met": ratios[name] <= bound}
        for name, times in found.items()
    ]


# ---- saves


def saves() -> list[dict[str, Any]]:
    init = {"x": jnp.linspace(0.0, 1.0, 10 * 2**18, dtype=jnp.float32), "y": jnp.zeros(256, jnp.float32)}

    def step(_: Any, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        y = state["y"]
        for _ in range(20):
            y = jnp.sin(y) * 1.1 + 0.1
        return {"x": state["x"].at[:256].set(y), "y": y}

    ways = {"no saves": NEVER, "checkpoint_every=2.0": 2.0}
    found: dict[str, list[float]] = {name: [] for name in ways}
    count = _steps_for(12.0, step, init)
    for _ in range(ROUNDS):
        for name, every in ways.items():
            found[name].append(milliseconds(_saved_run(count, step, init, every)) / 1e3)
    return compared(found, "s", 1.05)


def _saved_run(count: int, step: Any, init: Any, every: float) -> Callable[[Path], Any]:
    return lambda path: durable.fori_loop(0, count, step, init, directory=path, checkpoint_every=every)


def _steps_for(seconds: float, step: Any, init: Any) -> int:
    program = jax.jit(lambda n, x: lx.fori_loop(0, n, step, x))
    jax.block_until_ready(program(10, init))
    begin = time.perf_counter()
    jax.block_until_ready(program(20_000, init))
    return int(seconds / (time.perf_counter() - begin) * 20_000)


# ---- outputs


ROWS, ROW = 3 * 1024, 1 << 18  # 3 GiB of float32


def outputs() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as path:
        command = [sys.executable, "-m", "benchmarks.durable", path]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # an accelerator's memory is this process's
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    peak, seconds = float(found[-2]), float(found[-1])
    return [{"GiB of ys": 3.0, "peak GiB": peak, "bound": 1.5, "met": peak < 1.5, "s": seconds}]


def write_outputs(directory: Path) -> None:
    """Write 3 GiB of rows; prints the peak of this process's memory in GiB, and the seconds."""
    begin = time.perf_counter()

    def step(number: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return number + 1, jnp.full(ROW, number, jnp.float32)

    _, ys = durable.scan(step, jnp.float32(0), length=ROWS, directory=directory, checkpoint_every=10.0)
    seconds = time.perf_counter() - begin
    assert ys.nbytes == 3 << 30
    assert (ys[:: ROWS // 8, 0] == range(0, ROWS, ROWS // 8)).all()
    shutil.rmtree(directory)
    print(peak_memory() / 2**20, seconds)


def peak_memory() -> int:
    """The most KiB that this process has had resident.

    Linux hands `ru_maxrss` on to the processes that a large one starts; its own count of them starts anew.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    write_outputs(Path(sys.argv[1]) / "run")
