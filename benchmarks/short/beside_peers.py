"""What `bench` does without --device: four programs, beside what other libraries have, on JAX's default device."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import jax

from benchmarks.short.device import versions
from benchmarks.short.measure import DEVICE, PROCESSOR, Measurement, measure, numbers, used_columns
from benchmarks.short.programs import programs
from loopax._command.installed import machine
from loopax._command.table import show_table
from loopax._src.extras import optional

HEADERS = ["library", "ms", "x loopax", "temporary MiB", "compile s", "steps/s", "note"]


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and write what is asked for; the exit code is 1 where loopax itself fails."""
    print(machine(), flush=True)
    print(", ".join(f"{name} {version}" for name, version in versions().items()) + "\n", flush=True)
    measured, usual = [], PROCESSOR if jax.default_backend() == "cpu" else DEVICE
    for build in programs():
        program = build(usual)
        rows = measure(program, usual.rounds, warm=usual.warm, seconds=usual.seconds)
        show_table(program.name, *columns(rows), numeric=HEADERS[1:-1])
        measured += rows
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(measured), indent=2) + "\n")
    if arguments.figure:
        draw(measured).savefig(arguments.figure, dpi=110)
    return int(any(row.library.startswith("loopax") and row.milliseconds is None for row in measured))


def columns(rows: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows, without columns in which nothing stands."""
    return used_columns(HEADERS, [cells(row) for row in rows])


def cells(row: Measurement) -> list[str]:
    """A row of the table."""
    values = [
        (row.milliseconds, ".3g"),
        (row.ratio, ".2f"),
        (row.temporary_mib, ".2f"),
        (row.compile_seconds, ".2f"),
        (row.steps_per_second, ".2g"),
    ]
    return [row.library, *numbers(values), row.note]


def as_json(measured: Sequence[Measurement]) -> dict[str, Any]:
    """All that was measured, and on what."""
    return {"machine": machine(), "versions": versions(), "measured": [asdict(row) for row in measured]}


def draw(measured: Sequence[Measurement]) -> Any:
    """Time and temporary memory of each contender; one row of axes for a program."""
    figures = optional("matplotlib.figure", "matplotlib", "bench --figure")
    names = list(dict.fromkeys(row.program for row in measured))
    by_program = [[row for row in measured if row.program == name and row.milliseconds is not None] for name in names]
    heights = [len(rows) + 1.5 for rows in by_program]  # bars, and a title
    figure = figures.Figure(figsize=(5, 0.2 * sum(heights) + 0.2), layout="constrained")
    axes = figure.subplots(len(names), 2, squeeze=False, width_ratios=[1.2, 1], height_ratios=heights)
    for name, rows, (left, right) in zip(names, by_program, axes, strict=True):
        libraries = [row.library for row in rows]
        _bars(left, libraries, [row.milliseconds or 0.0 for row in rows], "{:.3g} ms".format)
        _bars(right, libraries, [row.temporary_mib or 0.0 for row in rows], _memory)
        left.set_title(" ", fontsize="medium")  # room for the name, which begins at the edge of the figure
        place: Any = ("figure fraction", "axes fraction")
        left.annotate(name, (0.01, 1.04), xycoords=place, weight="bold").set_in_layout(False)
        right.set_yticklabels([])
    axes[-1, 0].set_xlabel("time", loc="left")
    axes[-1, 1].set_xlabel("temporary memory", loc="left")
    return figure


def _bars(axes: Any, libraries: Sequence[str], values: Sequence[float], in_words: Callable[[float], str]) -> None:
    colours = ["C0" if library.startswith("loopax") else "darkgray" for library in libraries]
    bars = axes.barh(libraries, values, color=colours)
    axes.bar_label(bars, [in_words(value) for value in values], padding=3, fontsize=8.5)
    axes.set_xlim(0, 1.5 * max(values, default=0.0) or 1.0)
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(labelsize=8.5)


def _memory(mib: float) -> str:
    for unit, size in (("MiB", 1.0), ("KiB", 2.0**-10)):
        if mib >= size:
            return f"{mib / size:.3g} {unit}"
    return f"{mib * 2**20:.0f} B"
