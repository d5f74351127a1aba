"""`python -m loopax bench`: loopax beside its peers on this machine, in about a minute.

Small programs, measured in turn in one run: what counts are the ratios. The benchmark by which loopax is developed is
larger, and stands in the repository.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loopax._src.command import installed as versions
from loopax._src.command.machine import machine
from loopax._src.command.measure import Measurement, measure
from loopax._src.command.programs import programs
from loopax._src.command.table import show_table
from loopax._src.extras import optional

PEERS = ("jax", "jaxlib", "equinox", "flax", "diffrax")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to write what was measured."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, the machine and the versions")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw time and memory (.png or .svg; needs matplotlib)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and write what is asked for; the exit code is 1 where loopax itself fails."""
    problem = _problem(arguments)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    print(machine(), flush=True)
    print(", ".join(f"{name} {version}" for name, version in versions.of(PEERS).items()) + "\n", flush=True)
    measured = []
    for build in programs():
        program = build()
        rows = measure(program)
        show_table(program.name, *columns(rows), numeric=HEADERS[1:-1])
        measured += rows
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(measured), indent=2) + "\n")
    if arguments.figure:
        draw(measured).savefig(arguments.figure, dpi=110)
    return int(any(row.library.startswith("loopax") and row.milliseconds is None for row in measured))


def _problem(arguments: argparse.Namespace) -> str:
    """What would make the files fail, known before anything is measured."""
    for path in filter(None, (arguments.json, arguments.figure)):
        if not path.parent.is_dir():
            return f"{path}: there is no folder {path.parent}"
    try:
        if arguments.figure:
            optional("matplotlib", "matplotlib", "bench --figure")
    except ImportError as error:
        return str(error)
    return ""


HEADERS = ["library", "ms", "x loopax", "temporary MiB", "compile s", "steps/s", "note"]


def columns(rows: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows, without columns in which nothing stands."""
    table = [cells(row) for row in rows]
    used = [i for i in range(len(HEADERS)) if any(line[i] for line in table)]
    return [HEADERS[i] for i in used], [[line[i] for i in used] for line in table]


def cells(row: Measurement) -> list[str]:
    """A row of the table."""
    values = [
        (row.milliseconds, ".3g"),
        (row.ratio, ".2f"),
        (row.temporary_mib, ".2f"),
        (row.compile_seconds, ".2f"),
        (row.steps_per_second, ".2g"),
    ]
    return [row.library, *("" if value is None else format(value, how) for value, how in values), row.note]


def as_json(measured: Sequence[Measurement]) -> dict[str, Any]:
    """All that was measured, and on what."""
    return {"machine": machine(), "versions": versions.of(PEERS), "measured": [asdict(row) for row in measured]}


def draw(measured: Sequence[Measurement]) -> Any:
    """Time and temporary memory of each contender; one row of axes for a program."""
    figures = optional("matplotlib.figure", "matplotlib", "bench --figure")
    names = list(dict.fromkeys(row.program for row in measured))
    figure = figures.Figure(figsize=(9, 2.1 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), 2, squeeze=False, width_ratios=[1.35, 1])
    for name, (left, right) in zip(names, axes, strict=True):
        rows = [row for row in measured if row.program == name and row.milliseconds is not None][::-1]
        libraries = [row.library for row in rows]
        _bars(left, libraries, [row.milliseconds or 0.0 for row in rows], "{:.3g} ms".format)
        _bars(right, libraries, [row.temporary_mib or 0.0 for row in rows], _memory)
        left.set_title(name, fontsize="medium", loc="left")
        right.set_title("temporary memory", fontsize="medium", loc="left")
        right.set_yticklabels([])
    return figure


def _bars(axes: Any, libraries: Sequence[str], values: Sequence[float], in_words: Callable[[float], str]) -> None:
    colours = ["#1f4e79" if library.startswith("loopax") else "#b8c4d2" for library in libraries]
    bars = axes.barh(libraries, values, color=colours)
    axes.bar_label(bars, [in_words(value) for value in values], padding=3, fontsize="small")
    axes.set_xlim(0, 1.3 * max(values, default=0.0) or 1.0)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(labelsize="small")


def _memory(mib: float) -> str:
    for unit, size in (("MiB", 1.0), ("KiB", 2.0**-10)):
        if mib >= size:
            return f"{mib / size:.3g} {unit}"
    return f"{mib * 2**20:.0f} B"
