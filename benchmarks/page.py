"""Records as markdown: the page of all results, and what is printed as they come."""

from pathlib import Path
from typing import Any

from benchmarks.groups import Target
from benchmarks.records import KINDS, Record, Report, by_title, setting

Older = tuple[str, Record]  # its version of JAX, and the record with the same title


def page(report: Report, older: Report | None = None) -> str:
    """All results, and the ratios of a report of an older JAX beside them."""
    heading = [
        "# Benchmark",
        "",
        f"Machine: {setting(report)}. Written by `make bench`: peers are measured in the same run, in turn, and the",
        "medians are compared. What is not met is explained in `docs/benchmark.md`.",
        "",
    ]
    if report.get("peers"):
        heading += [f"Peers: {report['peers']}.", ""]
    if older:
        heading += [
            f"Beside them, in columns that say so, ratios with {_jax(older)}: of runs of their own, on two cores each.",
            "",
        ]
    sections = [section(record, _beside(record, older, kind)) for kind in KINDS for record in report[kind]]
    return "\n".join([*heading, *sections])


def write(report: Report, path: Path, older: Report | None = None) -> None:
    """As a file."""
    path.write_text(page(report, older))


def section(record: Record, older: Older | None = None) -> str:
    """A record, with the machine where it is not that of the others."""
    of_kind = _group if "programs" in record else _table if "rows" in record else _counts
    body = of_kind(record, older)
    remarks = [f"Machine: {record['setting']}."] if "setting" in record else []
    remarks += [record["remark"]] if record.get("remark") else []
    missing = ", ".join(record.get("missing", []))
    remarks += [f"Not measured, as not installed: {missing}."] if missing else []
    return "\n".join([f"## {record['title']}", "", *(line for r in remarks for line in (r, "")), *body, ""])


def cell(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return value if isinstance(value, str) else f"{value:.4g}"


def _rows(rows: list[Record]) -> list[str]:
    cells = ["| " + " | ".join(map(cell, row.values())) + " |" for row in rows]
    return ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0]), *cells]


def _jax(report: Report) -> str:
    return "JAX " + report["versions"].partition(",")[0].removeprefix("jax ")


def _beside(record: Record, older: Report | None, kind: str) -> Older | None:
    found = by_title(older, kind).get(record["title"]) if older else None
    return (_jax(older), found) if older and found else None


def _table(record: Record, older: Older | None) -> list[str]:
    if older is None:
        return _rows(record["rows"])
    version, before = older
    by_labels = {_labels(row): row for row in before["rows"]}
    rows = []
    for row in record["rows"]:
        found = by_labels.get(_labels(row), {})
        ratios = {f"{name}, {version}": found.get(name) for name in row if "/" in name or name == "ratio"}
        rows.append(row | ratios)
    return _rows(rows)


def _labels(row: Record) -> tuple[str, ...]:
    return tuple(f"{name}: {value}" for name, value in row.items() if isinstance(value, str))


def _counts(record: Record, older: Older | None) -> list[str]:
    values = record["values"].items()
    if older is None:
        return ["| | |", "|---|---|", *(f"| {name} | {cell(value)} |" for name, value in values)]
    version, before = older
    rows = [f"| {name} | {cell(value)} | {cell(before['values'].get(name))} |" for name, value in values]
    return [f"| | | {version} |", "|---|---|---|", *rows]


def _group(record: Record, older: Older | None) -> list[str]:
    steps, rows = record.get("steps"), []
    for m in record["programs"]:
        rate = {"million steps per s": f"{steps / m['milliseconds'] / 1e3:.3g}"} if steps else {}
        columns = {"program": m["name"], "median ms": f"{m['milliseconds']:.3g}"} | rate
        memory, compilation = f"{m['temporary_mib']:.4g}", f"{m['compile_seconds']:.2f}"
        rows.append(columns | {"temporary MiB": memory, "trace and compile s": compilation})
    lines = _rows(rows)
    if record["targets"]:
        rows = [_target(target) for target in record["targets"]]
        if older:
            version, before = older
            measured = {row["target"]: row["measured"] for row in map(_target, before["targets"])}
            rows = [row | {version: measured.get(row["target"])} for row in rows]
        lines += ["", *_rows(rows)]
    return lines


def _target(target: Record) -> Record:
    title = Target(target["quantity"], target["of"], _names(target["to"]), target["bound"]).title
    met = target["measured"] <= target["bound"]
    return {"target": title, "bound": f"{target['bound']:g}", "measured": f"{target['measured']:.3g}", "met": met}


def _names(to: str | list[str]) -> str | tuple[str, ...]:
    return to if isinstance(to, str) else tuple(to)
