"""`python -m loopax doctor`: check the versions, devices and settings that loopax needs, and test loopax."""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import jax

from loopax._src.command import blas, copies, cores, selftest
from loopax._src.command import installed as versions
from loopax._src.command.settings import settings
from loopax._src.command.table import show_table

T = TypeVar("T")
R = TypeVar("R")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Look at everything; the exit code is 1 if something fails, else 0."""
    del arguments
    start = time.perf_counter()
    failed = [*_versions(), *_settings(), *_transformations(), *_copies(), *_cores()]
    seconds = time.perf_counter() - start
    print(f"{len(failed)} failed ({'; '.join(failed)})" if failed else f"all is well ({seconds:.0f} s)")
    return 1 if failed else 0


def _versions() -> list[str]:
    packages = versions.found()
    headers = ["package", "version", "supported", "extra", ""]
    rows = [[p.name, p.version or "-", p.wanted, p.extra, p.status] for p in packages]
    show_table("Versions", headers, rows)
    return [package.name for package in packages if package.fails]


def _settings() -> list[str]:
    """They cannot fail, but that JAX finds no device, which is an error of its own."""
    found = [*settings(), blas.lapack_threads()]
    show_table("Devices and settings", ["setting", "value", ""], [list(setting) for setting in found])
    return []


def _transformations() -> list[str]:
    results = _each("self-test", selftest.run, selftest.checks())
    rows = [[r.name, f"FAILS: {r.error}" if r.error else "ok"] for r in results]
    show_table("Self-test: a tiny loop and branches against plain Python", ["transformation", ""], rows)
    return [result.name for result in results if result.error]


def _copies() -> list[str]:
    verdicts = [v for of_one in _each("compiled loops", copies.verdicts, copies.programs()) for v in of_one]
    rows = [[v.name, f"{v.arrays:.1f}", v.status] for v in verdicts]
    title = "Loops that write a row a step: does XLA copy all rows?"
    show_table(title, ["program", "arrays held", ""], rows, numeric=["arrays held"])
    return [verdict.name for verdict in verdicts if verdict.fails]


def _cores() -> list[str]:
    """What lanes gain from more cores. A gain cannot fail, but its process can."""
    number = cores.usable()
    if number < 2 or jax.default_backend() != "cpu":
        return []
    title = f"Lanes over {number} cores: `sharded_lanes` on {number} CPU devices (docs/cores.md)"
    try:
        gains = cores.gains(number)
    except (subprocess.SubprocessError, ValueError) as error:
        show_table(title, ["lanes", ""], [["not measured", f"FAILS: {error}"]])
        return ["lanes over cores"]
    headers = ["lanes", "one device, ms", f"{number} devices, ms", "times as fast"]
    rows = [[g.lanes, f"{g.alone * 1e3:.1f}", f"{g.together * 1e3:.1f}", f"{g.times:.1f}"] for g in gains]
    show_table(title, headers, rows, numeric=headers[1:])
    return []


def _each(what: str, function: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """One after another, with a line on a terminal that says how far it is."""
    values, results = list(values), []
    shows = sys.stderr.isatty()
    for i, value in enumerate(values):
        if shows:
            print(f"\r{what}: {i}/{len(values)}", end="", file=sys.stderr, flush=True)
        results.append(function(value))
    if shows:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return results
