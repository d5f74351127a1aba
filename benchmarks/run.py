"""Measure what is chosen, one item after the other: say how long it takes, and hand each on as soon as it is there."""

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec

import jax
from rich.console import Console
from rich.markdown import Markdown

from benchmarks import page
from benchmarks.groups import Findings, Group, Item, ratio
from benchmarks.measure import measure, unseen
from benchmarks.records import KINDS, Record, Report, by_title
from loopax._command.installed import machine

PEERS = ("flax", "diffrax", "traceax", "matfree", "brainstate", "jaxmore", "jax-tqdm")
Save = Callable[[Report], None]


def run(items: Sequence[Item], console: Console, estimates: dict[str, float], save: Save) -> tuple[Report, list[str]]:
    """The report, and the titles of what failed. `save` is given the report after each item."""
    about = {"machine": machine(), "versions": versions(), "peers": peers()}
    report: Report = about | {kind: [] for kind in KINDS}
    failed = []
    for i, item in enumerate(items):
        console.print(f"[{i + 1}/{len(items)}] {item.title}: {_remaining(items[i:], estimates)}", markup=False)
        try:
            record = _timed(item)
        except (RuntimeError, MemoryError, subprocess.CalledProcessError) as error:
            console.print(f"Failed, and left out: {type(error).__name__}: {_last_lines(error)}", markup=False)
            failed.append(item.title)
            continue
        report[kind_of(item)].append(record)
        console.print(Markdown(page.section(record)))
        save(report)
    return report, failed


def versions() -> str:
    """Of what is measured, and where it runs."""
    return f"jax {jax.__version__}, equinox {version('equinox')}, {jax.default_backend()}, float32"


def peers() -> str:
    """The versions of other libraries."""
    return ", ".join(f"{name} {version(name)}" for name in PEERS if find_spec(name.replace("-", "_")))


def kind_of(item: Item) -> str:
    """Where its record is kept."""
    return "groups" if isinstance(item, Group) else "tables" if isinstance(item, Findings) else "counts"


def _timed(item: Item) -> Record:
    start = time.perf_counter()
    record = _measured(item)
    return record | {"seconds": round(time.perf_counter() - start, 1)}


def _measured(item: Item) -> Record:
    if isinstance(item, Group):
        return _measured_group(item)
    if isinstance(item, Findings):
        columns = {"counts": list(item.counts), "memory": list(item.memory)}
        about = {name: titles for name, titles in columns.items() if titles}
        return {"title": item.title, "remark": item.remark, **about, "rows": item.rows()}
    return {"title": item.title, "values": item.values()}


def _measured_group(group: Group) -> Record:
    with unseen():
        found = measure(group.cases, group.rounds, group.compilations)
    targets = [{**asdict(t), "measured": ratio(t, found)} for t in group.targets]
    about = {"steps": group.steps, "missing": list(group.missing)}
    record = {"title": group.title, "programs": [asdict(m) for m in found.values()], "targets": targets}
    return record | {name: value for name, value in about.items() if value}


def _last_lines(error: BaseException) -> str:
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return "\n".join(str(output).strip().splitlines()[-3:])


# ---- how long it takes


def estimates(items: Iterable[Item], committed: Report) -> dict[str, float]:
    """Seconds for the items that have been measured before: as long as then, or what the times of programs come to."""
    records = {title: record for kind in KINDS for title, record in by_title(committed, kind).items()}
    found = {item.title: _seconds(item, records[item.title]) for item in items if item.title in records}
    return {title: seconds for title, seconds in found.items() if seconds is not None}


def _seconds(item: Item, record: Record) -> float | None:
    if "seconds" in record:
        return record["seconds"]
    if not isinstance(item, Group):
        return None
    programs = record["programs"]
    calls = 2 * item.rounds + 1
    compiling = item.compilations * sum(m["compile_seconds"] for m in programs)
    return compiling + calls * sum(m["milliseconds"] for m in programs) / 1e3


def _remaining(items: Sequence[Item], estimates: dict[str, float]) -> str:
    known = [estimates[item.title] for item in items if item.title in estimates]
    unknown = len(items) - len(known)
    this = f"about {_minutes(estimates[items[0].title])}" if items[0].title in estimates else "no estimate"
    if not known:
        return this
    more = f", and {unknown} without an estimate" if unknown else ""
    return f"{this}; from here on about {_minutes(sum(known))}{more}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
