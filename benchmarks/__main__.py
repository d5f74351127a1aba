"""Measure everything, print the tables, and write `benchmarks/results.md` and `benchmarks/results.json`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from rich.console import Console
from rich.table import Table

import loopax as lx
from benchmarks import (
    adaptive,
    budgets,
    durable,
    evaluations,
    histories,
    lanes,
    models,
    progress,
    ragged,
    sharded,
    stochtrace,
    stochtrace_errors,
    workloads,
)
from benchmarks.groups import EQUINOX, EVERY_CARRY, LAX_SCAN, Findings, Group, Target, markdown_of, ratio
from benchmarks.measure import Case, Measurement, machine, measure

HERE = Path(__file__).parent


def gradients(workload: workloads.Workload, to_equinox: float, to_every_carry: float, memory: float) -> Group:
    """Checkpointed() against Equinox and against saving every carry."""
    name = "loopax Checkpointed()"
    programs = {
        name: workloads.with_loopax(workload, lx.Checkpointed()),
        EQUINOX: workloads.with_equinox(workload),
        EVERY_CARRY: workloads.with_lax_scan(workload, checkpoint=True),
        LAX_SCAN: workloads.with_lax_scan(workload, checkpoint=False),
        "loopax Bounded(), run-time n": workloads.with_loopax(workload, lx.Bounded()),
        "loopax Residuals(), run-time n": workloads.with_loopax(workload, lx.Residuals()),
    }
    cases = [Case(key, workloads.gradient(workload, f), workload.arguments) for key, f in programs.items()]
    return Group(
        f"Gradient: {workload.name}",
        cases,
        [
            Target("time", name, EQUINOX, to_equinox),
            Target("time", name, EVERY_CARRY, to_every_carry),
            Target("temporary memory", name, EQUINOX, memory, "temporary_mib"),
            Target("trace and compile", name, EQUINOX, 1.0, "compile_seconds"),
        ],
        compilations=3,
    )


def static_kinds(workload: workloads.Workload) -> Group:
    """Residuals() and Bounded() where the number of steps is static, against what JAX has for that."""
    programs = {
        "loopax Residuals()": workloads.with_loopax(workload, lx.Residuals(), static=True),
        LAX_SCAN: workloads.with_lax_scan(workload, checkpoint=False),
        "loopax Bounded()": workloads.with_loopax(workload, lx.Bounded(), static=True),
        EVERY_CARRY: workloads.with_lax_scan(workload, checkpoint=True),
    }
    cases = [Case(key, workloads.gradient(workload, f), workload.arguments) for key, f in programs.items()]
    targets = [
        Target(quantity, ours, theirs, 1.05, attribute)
        for ours, theirs in [("loopax Residuals()", LAX_SCAN), ("loopax Bounded()", EVERY_CARRY)]
        for quantity, attribute in [("time", "milliseconds"), ("temporary memory", "temporary_mib")]
    ]
    return Group(f"Gradient, static n: {workload.name}", cases, targets)


def forward(workload: workloads.Workload) -> Group:
    """Every kind without a gradient, against `lax.while_loop` (run-time n) and `lax.scan` (static n)."""
    kinds = [lx.Lax(), lx.Checkpointed(), lx.Bounded(), lx.Residuals()]
    programs: dict[str, Any] = {
        "lax.while_loop": workloads.with_lax_while(workload),
        LAX_SCAN: workloads.with_lax_scan(workload, checkpoint=False),
    }
    programs |= {f"loopax {kind}": workloads.with_loopax(workload, kind) for kind in kinds}
    programs |= {f"loopax {kind}, static n": workloads.with_loopax(workload, kind, static=True) for kind in kinds}
    targets = [Target("time", f"loopax {kind}", "lax.while_loop", 1.05) for kind in kinds]
    targets += [Target("time", f"loopax {kind}, static n", LAX_SCAN, 1.05) for kind in kinds]
    cases = [Case(name, program, workload.arguments) for name, program in programs.items()]
    return Group(f"Forward: {workload.name}", cases, targets, rounds=21)


def borrowing() -> Group:
    """What borrowing costs where every lane has weights of its own: no peer, and no target."""
    forward = jax.vmap(lanes.lane_with_loopax)
    gradient = jax.vmap(jax.grad(lanes.lane_with_loopax))
    outside = jax.grad(lambda weights, y, n: forward(weights, y, n).sum())
    programs = {"forward": forward, "vmap of grad": gradient, "grad of vmap": outside}
    programs |= {f"{name}, not borrowing": lanes.without_borrowing(f) for name, f in programs.items()}
    cases = [Case(name, program, lanes.ensemble()) for name, program in programs.items()]
    return Group("64 lanes with weights of their own: what borrowing costs", cases, [])


def groups() -> list[Group]:
    """All tables."""
    lorenz, by_indices = workloads.lorenz(), workloads.lorenz_indexed()
    perceptron, recurrent = workloads.perceptron(), workloads.recurrent()
    return [
        gradients(lorenz, 0.08, 0.5, 1.0),
        gradients(by_indices, 0.08, 0.5, 1.0),
        gradients(perceptron, 0.82, 1.25, 1.0),
        gradients(recurrent, 0.95, 1.22, 1.1),
        static_kinds(perceptron),
        static_kinds(recurrent),
        forward(lorenz),
        forward(perceptron),
        forward(recurrent),
        borrowing(),
        *ragged.groups(),
        *budgets.groups(),
        *models.groups(),
        *adaptive.groups(),
        *histories.groups(),
        *progress.groups(),
        *stochtrace.groups(),
    ]


def tables() -> list[Findings]:
    """All tables of what is counted, not timed."""
    return [
        Findings("Evaluations per step, n = 1000", evaluations.counted),
        *stochtrace.tables(),
        *stochtrace_errors.tables(),
        *durable.tables(),
        *sharded.tables(),
    ]


def markdown(record: dict[str, Any]) -> str:
    """One group as tables."""
    heading = "| program | median ms | temporary MiB | trace and compile s |"
    lines = [f"## {record['title']}", "", heading, "|---|---|---|---|"]
    lines += [
        f"| {m['name']} | {m['milliseconds']:.3g} | {m['temporary_mib']:.4g} | {m['compile_seconds']:.2f} |"
        for m in record["programs"]
    ]
    if record["targets"]:
        lines += ["", "| target | bound | measured | met |", "|---|---|---|---|"]
    for target in record["targets"]:
        met = "yes" if target["measured"] <= target["bound"] else "**no**"
        title = Target(*(target[name] for name in ("quantity", "of", "to", "bound"))).title
        lines.append(f"| {title} | {target['bound']:g} | {target['measured']:.3g} | {met} |")
    return "\n".join([*lines, ""])


def show(console: Console, group: Group, found: dict[str, Measurement]) -> None:
    """Print one group."""
    table = Table("program", "median ms", "temporary MiB", "trace and compile s", title=group.title)
    for m in found.values():
        table.add_row(m.name, f"{m.milliseconds:.3g}", f"{m.temporary_mib:.4g}", f"{m.compile_seconds:.2f}")
    console.print(table)
    for target in group.targets:
        measured = ratio(target, found)
        mark = "[green]met[/]" if measured <= target.bound else "[red]not met[/]"
        what = f"{target.title}"
        console.print(f"  {what} = {measured:.3g} (bound {target.bound:g}) {mark}")


def _counts_table(title: str, found: dict[str, Any]) -> str:
    rows = [f"| {name} | {value:.4g} |" for name, value in found.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *rows, ""])


def measured_groups(console: Console, part: str) -> list[dict[str, Any]]:
    """Those whose title contains `part`."""
    records = []
    for group in groups():
        if part not in group.title:
            continue
        with progress.unseen():
            found = measure(group.cases, group.rounds, group.compilations)
        show(console, group, found)
        targets = [{**asdict(t), "measured": ratio(t, found)} for t in group.targets]
        records.append({"title": group.title, "programs": [asdict(m) for m in found.values()], "targets": targets})
    return records


def measured_tables(console: Console, part: str) -> list[dict[str, Any]]:
    """Those whose title contains `part`."""
    records = []
    for table in tables():
        if part not in table.title:
            continue
        records.append({"title": table.title, "remark": table.remark, "rows": table.rows()})
        console.print(markdown_of(**records[-1]))
    return records


def counts() -> dict[str, dict[str, Any]]:
    """What is counted once."""
    return {
        "256 chains of slice sampling: batched iterations": ragged.nested_iterations(),
        "PLAID: steps of the cell in one epoch, forward": ragged.series_steps(),
        "Histories and buffers: compilations for ten different lengths": histories.compilations(),
    }


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The old records, those with a new one of the same title replaced, others behind them."""
    by_title = {record["title"]: record for record in new}
    kept = [by_title.pop(record["title"], record) for record in old]
    return [*kept, *by_title.values()]


def with_part(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """All results, those of a part new; they say so where they are of another machine or of other versions."""
    setting = f"{new['machine']}. {new['versions']}"
    elsewhere = {} if setting == f"{old['machine']}. {old['versions']}" else {"setting": setting}
    for kind in ("groups", "tables"):
        old[kind] = merged(old[kind], [record | elsewhere for record in new[kind]])
    return old


def section(record: dict[str, Any]) -> str:
    """A group or a table, with the machine where it is not that of the others."""
    text = markdown(record) if "programs" in record else markdown_of(**_without(record, "setting"))
    if "setting" not in record:
        return text
    title, _, rest = text.partition("\n")
    return f"{title}\n\nMachine: {record['setting']}.\n{rest}"


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def write(report: dict[str, Any]) -> None:
    """As JSON, and as a page."""
    heading = [
        "# Benchmark",
        "",
        f"Machine: {report['machine']}. {report['versions']}. Written by `make bench`: peers are measured in the same",
        "run, in turn,",
        "and the medians are compared. What is not met is explained in `docs/benchmark.md`.",
        "",
    ]
    sections = [
        *map(section, report["groups"]),
        *map(section, report["tables"]),
        *(_counts_table(title, found) for title, found in report["counts"].items()),
    ]
    (HERE / "results.md").write_text("\n".join([*heading, *sections]))
    (HERE / "results.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Measure and print all, and write it; or what is named only, which --write puts among the results there are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="measure groups and tables whose title contains this")
    parser.add_argument("--write", action="store_true", help="put what is measured of a part among the results")
    chosen, console = parser.parse_args(), Console()
    versions = f"jax {jax.__version__}, equinox {eqx.__version__}, {jax.default_backend()}, float32"
    report = {
        "machine": machine(),
        "versions": versions,
        "groups": measured_groups(console, chosen.part),
        "tables": measured_tables(console, chosen.part),
        "counts": {} if chosen.part else counts(),
    }
    if chosen.part and chosen.write:
        write(with_part(json.loads((HERE / "results.json").read_text()), report))
    elif not chosen.part:
        write(report)


if __name__ == "__main__":
    main()
