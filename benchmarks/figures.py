"""Figures of the results, for the pages."""

from collections.abc import Callable
from math import floor, log10
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.groups import is_peer
from benchmarks.records import Record, Report, by_title
from docs.figures import STYLE, save

# A program's marker and colour: loopax is blue, and each peer has a colour of its own.
STYLES = {
    "loopax Checkpointed()": ("o", "tab:blue"),
    "loopax Auto()": ("D", "tab:blue"),
    "loopax Bounded(), run-time n": ("s", "tab:blue"),
    "loopax Residuals(), run-time n": ("^", "tab:blue"),
    "Equinox checkpointed": ("o", "tab:orange"),
    "lax.scan of jax.checkpoint": ("s", "tab:green"),
    "lax.scan": ("^", "tab:green"),
    "brainstate bounded_while_loop": ("D", "tab:red"),
    "brainstate checkpointed_scan, static n": ("X", "tab:red"),
    "jaxmore bounded_while_loop": ("P", "tab:purple"),
}

RING: dict[str, Any] = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 2}  # shows what is under it


def draw(report: Report, directory: Path) -> list[Path]:
    """Write those of which the report has something, and return where."""
    groups, tables = by_title(report, "groups"), by_title(report, "tables")
    with mpl.rc_context(STYLE):
        figures = {
            "gradients": gradients(groups),
            "budgets": budgets(groups),
            "auto": automatic(groups),
            "lanes": lanes(groups),
            "traces": traces(groups),
            "small-bodies": small_bodies(groups),
            "condition-checks": condition_checks(tables),
        }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(directory / f"benchmark-{name}.svg")
            save(figure, written[-1])
            plt.close(figure)
    return written


def panels(records: list[Record], draw: Callable[[Axes, Record], None], height: float) -> Figure | None:
    """A figure with a panel for each of the records, one below another, if there are any."""
    if not records:
        return None
    figure, grid = panels_below(len(records), height)
    for axes, record in zip(grid, records, strict=True):
        draw(axes, record)
    return figure


def panels_below(number: int, height: float) -> tuple[Figure, list[Axes]]:
    """An empty figure as wide as a page shows it on a phone, and its panels."""
    figure, grid = plt.subplots(number, figsize=(5, height * number + 0.6), layout="constrained", squeeze=False)
    return figure, list(grid.flat)


def short(title: str) -> str:
    """What stands behind the first colon."""
    return title.split(": ", 1)[1]


def called(records: dict[str, Record], beginning: str) -> list[Record]:
    """Those whose titles begin so."""
    return [record for title, record in records.items() if title.startswith(beginning)]


def legend_below(figure: Figure, columns: int) -> None:
    """One legend for all panels."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)


def plain_logarithms(axis: Axis) -> None:
    """Numbers without powers, closer together where the axis is short."""
    low, high = axis.get_view_interval()
    close, closer = (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    steps = (1.0,) if high > 100 * low else close if high > 5 * low else closer
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


# ---- time against memory


def gradients(groups: dict[str, Record]) -> Figure | None:
    """Every program's gradient of four recurrences."""

    def draw_one(axes: Axes, record: Record) -> None:
        for m in record["programs"]:
            marker, color = STYLES.get(m["name"], ("v", "tab:gray"))
            how: dict[str, Any] = {"markersize": 7} if is_peer(m["name"]) else RING
            point = [m["temporary_mib"]], [m["milliseconds"]]
            axes.plot(*point, label=m["name"], marker=marker, color=color, linestyle="none", **how)
        _time_against_memory(axes, short(record["title"]))

    figure = panels(called(groups, "Gradient: "), draw_one, height=2.5)
    if figure:
        legend_below(figure, 2)
    return figure


def _time_against_memory(axes: Axes, title: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel="temporary memory, MiB", ylabel="gradient, ms")
    axes.set_title(title)
    axes.margins(0.15)
    for axis in (axes.xaxis, axes.yaxis):
        plain_logarithms(axis)
    axes.grid(which="major", alpha=0.3)


def budgets(groups: dict[str, Record]) -> Figure | None:
    """10 and 20 checkpoints, and what each library takes by itself."""
    series = {
        "loopax": (["loopax, 10", "loopax, 20"], "loopax Checkpointed()", "o-", "tab:blue"),
        "loopax, unknown length": (
            [f"loopax while_loop without a bound, {c}" for c in (10, 20)],
            None,
            "s--",
            "tab:cyan",
        ),
        "Equinox": (["Equinox, 10", "Equinox, 20"], "Equinox checkpointed", "o-", "tab:orange"),
    }

    def draw_one(axes: Axes, record: Record) -> None:
        found = {m["name"]: m for m in record["programs"]}
        by_default = groups.get(f"Gradient: {short(record['title'])}", {"programs": []})
        found |= {m["name"]: m for m in by_default["programs"]}
        for label, (names, default, style, color) in series.items():
            programs = [found[name] for name in [*names, default] if name in found]
            memory, times = ([m[key] for m in programs] for key in ("temporary_mib", "milliseconds"))
            axes.plot(memory, times, style, color=color, label=label)
            if label != "loopax, unknown length":
                beside: Any = (
                    {"xytext": (-4, -4), "ha": "right", "va": "top"} if label == "loopax" else {"xytext": (4, 5)}
                )
                for m, text in zip(programs, ("10", "20", "default"), strict=False):
                    where = m["temporary_mib"], m["milliseconds"]
                    axes.annotate(text, where, textcoords="offset points", **beside)
        _time_against_memory(axes, short(record["title"]))

    figure = panels(called(groups, "Gradient with 10 and 20 checkpoints: "), draw_one, height=2.4)
    if figure:
        legend_below(figure, 3)
    return figure


# ---- ratios as bars


def bars(axes: Axes, rows: list[str], columns: dict[str, list[float]], colors: list[Any]) -> None:
    """Groups of horizontal bars, the first on top; a line at one."""
    height = 0.8 / len(columns)
    for i, (label, values) in enumerate(columns.items()):
        places = np.arange(len(rows)) + (i - (len(columns) - 1) / 2) * height
        axes.barh(places, values, height, label=label, color=colors[i])
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)


def relative_to(name: str, records: list[Record], names: list[str]) -> dict[str, list[float]]:
    """The time of each program over that of one, in each record."""
    found = [{m["name"]: m["milliseconds"] for m in record["programs"]} for record in records]
    return {key: [times.get(key, np.nan) / times[name] for times in found] for key in names}


def automatic(groups: dict[str, Record]) -> Figure | None:
    """Every kind's gradient of the programs of the benchmark, over the fastest."""
    records = called(groups, "Auto: ")
    if not records:
        return None
    kinds = {"Checkpointed()": "o", "Bounded()": "s", "Residuals()": "^"}
    figure, axes = plt.subplots(figsize=(5, 0.4 * len(records) + 0.9), layout="constrained")
    for place, record in enumerate(records):
        axes.annotate(short(record["title"]), (0, place - 0.36), xycoords=("axes fraction", "data"))
        times = {m["name"]: m["milliseconds"] for m in record["programs"]}
        fastest = min(times[kind] for kind in kinds)
        for kind, marker in kinds.items():
            axes.plot(times[kind] / fastest, place, marker, color="tab:gray", label=kind)
        axes.plot(times["Auto"] / fastest, place, "o", color="tab:blue", label="Auto()", **RING)
    axes.set(yticks=[], ylim=(len(records) - 0.5, -1), xlabel="time of the gradient, over that of the fastest kind")
    axes.spines["left"].set_visible(False)
    axes.grid(alpha=0.3)
    legend_below(figure, 4)
    return figure


def lanes(groups: dict[str, Record]) -> Figure | None:
    """1024 lanes over the vmapped loops of lax and Equinox."""
    sides = {"forward": "vmapped lax.while_loop", "gradient of shared weights": "Equinox checkpointed under vmap"}
    names = {
        "loopax lockstep": "tab:gray",
        "loopax compact, fori_loop": "tab:blue",
        "loopax compact, while_loop": "tab:cyan",
        "loopax lanes_map, 128 lanes": "tab:purple",
    }
    counts = [t.split(", ")[1].split(":")[0] for t in groups if t.startswith("1024 lanes") and t.endswith("forward")]
    if not counts:
        return None
    figure, grid = panels_below(len(sides), 3.2)
    for axes, (what, peer) in zip(grid, sides.items(), strict=True):
        records = [groups[f"1024 lanes, {name}: {what}"] for name in counts]
        bars(axes, counts, relative_to(peer, records, list(names)), list(names.values()))
        axes.set(xscale="log", xlabel=f"time over that of {peer}")
        axes.set_title(what)
        plain_logarithms(axes.xaxis)
    legend_below(figure, 2)
    return figure


def traces(groups: dict[str, Record]) -> Figure | None:
    """Estimates of a trace over traceax's."""
    titles = [title for title in groups if title.startswith("Traces: ") and "traceax" in _names(groups[title])]
    if not titles:
        return None
    rows = [", ".join(short(title).split(", ")[:2]) for title in titles]
    names = {"loopax, batch=64": "tab:blue", "loopax, batch=16": "tab:cyan", "matfree": "tab:red"}
    figure, axes = plt.subplots(figsize=(5, 4.2), layout="constrained")
    columns = relative_to("traceax", [groups[title] for title in titles], list(names))
    bars(axes, rows, columns, list(names.values()))
    axes.set_xlabel(f"time over that of traceax, {', '.join(short(titles[0]).split(', ')[2:])}")
    legend_below(figure, 3)
    return figure


def _names(record: Record) -> list[str]:
    return [m["name"] for m in record["programs"]]


# ---- small bodies


def small_bodies(groups: dict[str, Record]) -> Figure | None:
    """Nanoseconds a step."""

    def draw_one(axes: Axes, record: Record) -> None:
        programs = record["programs"][::-1]
        times = [1e6 * m["milliseconds"] / record["steps"] for m in programs]
        names = [m["name"].replace("(checkpoints=None)", "()").replace("(memory=268435456)", "()") for m in programs]
        axes.barh(names, times, color=["tab:orange" if is_peer(name) else "tab:blue" for name in names])
        axes.set(xscale="log", xlabel="ns a step", xlim=(10 ** floor(log10(min(times))), None))
        plain_logarithms(axes.xaxis)
        axes.set_title(short(record["title"]))
        axes.tick_params(axis="y", labelsize=8.5)
        axes.grid(axis="x", which="major", alpha=0.3)

    return panels(called(groups, "Small bodies: "), draw_one, height=3.4)


def condition_checks(tables: dict[str, Record]) -> Figure | None:
    """The time of a loop that asks its condition every k steps."""
    if "Condition asked every k steps" not in tables:
        return None
    rows = tables["Condition asked every k steps"]["rows"]
    sides = list(dict.fromkeys((row[""], row["lanes"]) for row in rows))
    figure, grid = panels_below(len(sides), 2.2)
    for axes, side in zip(grid, sides, strict=True):
        for row in (row for row in rows if (row[""], row["lanes"]) == side):
            found = {1: 1.0} | {int(k[4:]): v for k, v in row.items() if k.startswith("k = ") and v is not None}
            axes.plot(list(found), list(found.values()), "o-", markersize=4, label=row["body"])
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="k", ylabel="over k = 1")
        axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axes.minorticks_off()
        plain_logarithms(axes.yaxis)
        axes.set_title(f"{side[0]}, {side[1]} lane{'s' if side[1] != '1' else ''}")
        axes.grid(alpha=0.3)
    legend_below(figure, 3)
    return figure
