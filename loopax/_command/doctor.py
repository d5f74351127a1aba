"""`python -m loopax doctor`: check the versions, devices and settings that loopax needs, and test loopax."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import loopax as lx
from loopax._command import copies, cores, selftest
from loopax._command import installed as versions
from loopax._command.table import show_table

# Devices, and the settings of JAX that change what a loop does.


class Setting(NamedTuple):
    """A setting and what it means; no note where it is what most people have."""

    name: str
    value: str
    note: str = ""


# Name, the usual value, and what another one means for a loop.
_FLAGS = [
    ("jax_disable_jit", False, "loops run in Python, step by step: slow, for debugging"),
    ("jax_debug_nans", False, "a NaN in any result is an error, and what made it runs again without jit"),
    ("jax_debug_infs", False, "an infinity in any result is an error, and what made it runs again without jit"),
    ("jax_check_tracer_leaks", False, "tracing is slow, and is done again for every call"),
    ("jax_numpy_rank_promotion", "allow", "shapes of different rank in a body may be refused"),
    ("jax_numpy_dtype_promotion", "standard", "mixed dtypes in a body are refused"),
]
_VARIABLES = (
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)


def settings() -> list[Setting]:
    """What the machine has, and how JAX is set."""
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    found = [Setting("devices", f"{len(devices)} x {jax.default_backend()} ({', '.join(kinds)})")]
    if jax.process_count() > 1:
        found.append(Setting("processes", f"{jax.process_count()}, this is number {jax.process_index()}"))
    config: Any = jax.config
    precision = "numbers have 64 bits unless said otherwise" if config.jax_enable_x64 else "float64 becomes float32"
    found.append(Setting("jax_enable_x64", str(config.jax_enable_x64), precision))
    for name, usual, note in _FLAGS:
        value = getattr(config, name)
        found.append(Setting(name, str(value), "" if value == usual else note))
    cache, note = config.jax_compilation_cache_dir, "programs that call Python (run-time checks) may not be kept"
    if cache is None:
        cache, note = "off", "jax_compilation_cache_dir would keep compiled programs"
    found.append(Setting("compilation cache", str(cache), note))
    for name in _VARIABLES:  # each flag on a line of its own
        found += [Setting(name, value) for value in dict.fromkeys(os.environ.get(name, "").split())]
    return found


# Whether LAPACK's threads get in the way of XLA's: then small factorizations take milliseconds. How does a triangular
# solve of LAPACK fare that uses several threads, right behind work of XLA's own threads?

FEW, MANY = 16, 32  # columns that OpenBLAS solves for on one thread, and on all of them
MOST = 2.0  # milliseconds that the second may take longer; the arithmetic takes a hundredth of it
ROUNDS = 24


def lapack_threads() -> Setting:
    """Whether they wait for XLA's."""
    name, large = "LAPACK's threads", jnp.ones((600, 600)) / 600
    if jax.default_backend() != "cpu":
        return Setting(name, "not used")

    @jax.jit
    def solve(large: Any, matrix: Any) -> Any:
        product, matrix = jax.lax.optimization_barrier((large @ large, matrix))
        return product, jax.scipy.linalg.solve_triangular(matrix, matrix, lower=True)

    def milliseconds(columns: int) -> float:
        """The lower quartile, since others compute too."""
        matrix = jnp.eye(columns) + jnp.tril(jnp.ones((columns, columns)), -1) / columns
        jax.block_until_ready(solve(large, matrix))
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            jax.block_until_ready(solve(large, matrix))
            times.append(1e3 * (time.perf_counter() - start))
        return sorted(times)[ROUNDS // 4]

    late = milliseconds(MANY) - milliseconds(FEW)
    if late <= MOST:
        return Setting(name, "in nobody's way")
    note = "OpenBLAS's threads wait for cores that XLA's have: set OPENBLAS_NUM_THREADS=1 before Python starts"
    return Setting(name, f"{late:.0f} ms late", note)


def compile_time() -> Setting:
    """How long XLA takes for a small gradient here, beside that of `jax.lax`."""

    def seconds(scan: Callable[..., Any]) -> float:
        def loss(x: Any) -> Any:
            return scan(lambda x, _: (jnp.sin(x), None), x, None, length=1000)[0].sum()

        times = []
        for _ in range(3):
            start = time.perf_counter()
            jax.jit(jax.grad(partial(loss))).lower(jnp.ones(8)).compile()  # a new function, which is compiled again
            times.append(time.perf_counter() - start)
        return min(times)

    ours, theirs = seconds(lx.scan), seconds(jax.lax.scan)
    return Setting("compile time", f"{ours:.2f} s", f"for the gradient of a small scan; with jax.lax {theirs:.2f} s")


def run(_arguments: argparse.Namespace) -> int:
    """Look at everything; the exit code is 1 if something fails, else 0."""
    start = time.perf_counter()
    packages = versions.found()
    rows = [[p.name, p.version or "-", p.wanted, p.extra, p.status] for p in packages]
    show_table("Versions", ["package", "version", "supported", "extra", ""], rows)
    failed = [package.name for package in packages if package.fails]
    # Settings cannot fail, but that JAX finds no device, which is an error of its own.
    show_table("Devices and settings", ["setting", "value", ""], [*settings(), compile_time(), lapack_threads()])
    checks = selftest.checks()
    results = list(zip(checks, _each("self-test", selftest.run, checks), strict=True))
    rows = [[check.name, f"FAILS: {error}" if error else "ok"] for check, error in results]
    show_table("Self-test: a tiny loop and branches against plain Python", ["transformation", ""], rows)
    failed += [check.name for check, error in results if error]
    programs = list(product(copies.programs(), (False, True)))  # forward and gradient
    verdicts = _each("compiled loops", lambda program: copies.judge(*program), programs)
    rows = [[v.name, f"{v.arrays:.1f}", v.status] for v in verdicts]
    title = "Loops that write a row a step: does XLA copy all rows?"
    show_table(title, ["program", "arrays held", ""], rows, numeric=["arrays held"])
    failed += [verdict.name for verdict in verdicts if verdict.fails]
    failed += _cores()
    well = f"all is well ({time.perf_counter() - start:.0f} s)"
    print(f"{len(failed)} failed ({'; '.join(failed)})" if failed else well)
    return int(bool(failed))


def _cores() -> list[str]:
    """What lanes gain from more cores. A gain cannot fail, but its process can."""
    number = cores.usable()
    if number < 2 or jax.default_backend() != "cpu":
        return []
    title = f"Lanes over {number} cores: `sharded_lanes` on {number} CPU devices (docs/many-devices.md)"
    try:
        gains = cores.gains(number)
    except (subprocess.SubprocessError, ValueError) as error:
        show_table(title, ["lanes", ""], [["not measured", f"FAILS: {error}"]])
        return ["lanes over cores"]
    headers = ["lanes", "one device, ms", f"{number} devices, ms", "times as fast"]
    rows = [[g.lanes, f"{g.alone * 1e3:.1f}", f"{g.together * 1e3:.1f}", f"{g.times:.1f}"] for g in gains]
    show_table(title, headers, rows, numeric=headers[1:])
    return []


def _each(what: str, function: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    """One after another, with a line on a terminal that says how far it is."""
    results, shows = [], sys.stderr.isatty()
    for i, value in enumerate(values):
        if shows:
            print(f"\r{what}: {i}/{len(values)}", end="", file=sys.stderr, flush=True)
        results.append(function(value))
    if shows:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return results
