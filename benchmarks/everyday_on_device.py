"""Everyday scans, steps that read and write rows, and many small leaves on a GPU, written to a file named after it.

    python -m benchmarks.everyday_on_device FOLDER              # the programs are compiled by several processes first
    python -m benchmarks.everyday_on_device FOLDER --part 3/14  # what one of these processes does

A program of a GPU takes seconds to compile and milliseconds to run, so what is compiled is kept in JAX's cache. Runs
with several XLA_FLAGS stand in one file.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share one GPU

import jax
import jax.numpy as jnp
from jax import Array, lax

import loopax as lx
from benchmarks import everyday, reads

PROCESSES, ROUNDS, SECONDS = 14, 7, 2.0
KINDS = {
    "loopax": {},
    "Residuals()": {"kind": "residuals"},
    "Bounded()": {"kind": "bounded"},
    "Checkpointed()": {"kind": "checkpointed"},
}
STEPS = 200  # of those that read or write rows


class Row(NamedTuple):
    """Programs that are measured in turn."""

    table: str
    name: str
    programs: dict[str, Any]
    arguments: tuple[Any, ...]


def table() -> Iterator[Row]:
    """Everything that is measured."""
    for name, (program, arguments) in (everyday.TWENTY | everyday.TEN).items():
        scans = {"lax": lax.scan} | {of: partial(everyday.default, **options) for of, options in KINDS.items()}
        programs = {of: jax.grad(program(scan)) for of, scan in scans.items()}
        yield Row("everyday scans, gradient", name, programs, arguments)
    for size in (reads.SMALL_ROWS, reads.LARGE_ROWS):
        numbers = f"{size * reads.WIDTH} numbers"
        for name, read in reads.READS.items():
            given = reads.arrays(size), jnp.int32(STEPS)
            scans = {of: reads.SCANS[of] for of in (reads.LAX_SCAN, reads.DEFAULT, reads.CHECKPOINTED)}
            programs = {of: reads.gradient(read, scan, STEPS) for of, scan in scans.items()}
            yield Row(f"reads of {numbers}, {STEPS} steps, gradient", name, programs, given)
        for name, write in reads.WRITES.items():
            loops = {"lax": lax.fori_loop} | {
                of: partial(lx.fori_loop, **options) for of, options in KINDS.items() if of != "Bounded()"
            }
            yield Row(
                f"writes of {numbers}, {STEPS} steps, gradient",
                name,
                {of: _gradient_of_writes(write, loop) for of, loop in loops.items()},
                (reads.arrays(size)[0],),
            )
    start = [jnp.float32(0.1 * i) for i in range(60)]
    scans = {"lax": lax.scan, "loopax": everyday.default}
    leaves = {of: _gradient_of_leaves(scan, lambda c: [jnp.sin(x) for x in c]) for of, scan in scans.items()}
    yield Row("many leaves, 1000 steps, gradient", "60 scalars", leaves, (start,))
    whole = {of: _gradient_of_leaves(scan, jnp.sin) for of, scan in scans.items()}
    yield Row("many leaves, 1000 steps, gradient", "one array of 60", whole, (jnp.stack(start),))


def _gradient_of_writes(write: Any, loop: Any) -> Any:
    return jax.grad(lambda xs: loop(0, STEPS, write, xs).sum())


def _gradient_of_leaves(scan: Any, step: Any) -> Any:
    def loss(start: Any) -> Array:
        last, _ = scan(lambda c, _: (step(c), None), start, None, length=1000)
        return sum((x.sum() for x in jax.tree.leaves(last)), jnp.zeros(()))

    return jax.grad(loss)


def measured(row: Row) -> dict[str, Any]:
    """Milliseconds and temporary MiB of each program of the row; or what went wrong."""
    from loopax._src.insight.compare import compiled, interleaved

    found, programs = {}, {}
    for of, function in row.programs.items():
        try:
            programs[of] = compiled(function, row.arguments)
            programs[of].call()
        except Exception as error:  # noqa: BLE001 - one program that fails takes no other with it
            found[of] = {"error": str(error)[:300]}
    programs = {of: program for of, program in programs.items() if of not in found}
    times = interleaved([program.call for program in programs.values()], ROUNDS, warm=True, seconds=SECONDS)
    for (of, program), ms in zip(programs.items(), times, strict=True):
        found[of] = {"ms": round(ms, 4), "temporary_mib": round(program.temporary_mib, 4)}
    return {"table": row.table, "name": row.name} | found


def main(folder: Path, part: str) -> None:
    """Compile in several processes, then measure in this one."""
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    begun = time.perf_counter()
    if part:
        i, of = map(int, part.split("/"))
        for row in list(table())[i::of]:
            for function in row.programs.values():
                try:
                    jax.jit(function).lower(*row.arguments).compile()
                except Exception as error:  # noqa: BLE001 - it is reported where it is measured
                    print(row.name, error, file=sys.stderr)
        return
    command = [sys.executable, "-m", "benchmarks.everyday_on_device", str(folder), "--part"]
    processes = [subprocess.Popen([*command, f"{i}/{PROCESSES}"]) for i in range(PROCESSES)]
    for process in processes:
        process.wait()
    print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    kind, flags, rows = jax.devices()[0].device_kind, os.environ.get("XLA_FLAGS", ""), []
    path = folder / f"everyday-{kind.lower().replace(' ', '-')}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    about = {"device": kind, "jax": jax.__version__, "date": date.today().isoformat()}
    others = [run for run in runs if run["XLA_FLAGS"] != flags]
    for row in table():
        rows.append(measured(row))
        path.write_text(json.dumps({"runs": [*others, about | {"XLA_FLAGS": flags, "rows": rows}]}, indent=1) + "\n")
        print(f"{time.perf_counter() - begun:.0f} s: {row.table}: {row.name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3] if len(sys.argv) > 3 else "")
