"""Records as markdown: the page of all results, and what is printed as they come."""

from pathlib import Path
from typing import Any

from benchmarks.groups import Target
from benchmarks.records import Record, Report, setting


def page(report: Report) -> str:
    """All results."""
    heading = [
        "# Benchmark",
        "",
        f"Machine: {setting(report)}. Written by `make bench`: peers are measured in the same run, in turn, and the",
        "medians are compared. What is not met is explained in `docs/benchmark.md`.",
        "",
    ]
    if report.get("peers"):
        heading += [f"Peers: {report['peers']}.", ""]
    sections = [section(record) for kind in ("groups", "tables", "counts") for record in report[kind]]
    return "\n".join([*heading, *sections])


def write(report: Report, path: Path) -> None:
    """As a file."""
    path.write_text(page(report))


def section(record: Record) -> str:
    """A record, with the machine where it is not that of the others."""
    body = _group(record) if "programs" in record else _table(record) if "rows" in record else _counts(record)
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


def _table(record: Record) -> list[str]:
    return _rows(record["rows"])


def _counts(record: Record) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {cell(value)} |" for name, value in record["values"].items())]


def _group(record: Record) -> list[str]:
    steps, rows = record.get("steps"), []
    for m in record["programs"]:
        rate = {"million steps per s": f"{steps / m['milliseconds'] / 1e3:.3g}"} if steps else {}
        columns = {"program": m["name"], "median ms": f"{m['milliseconds']:.3g}"} | rate
        memory, compilation = f"{m['temporary_mib']:.4g}", f"{m['compile_seconds']:.2f}"
        rows.append(columns | {"temporary MiB": memory, "trace and compile s": compilation})
    lines = _rows(rows)
    if record["targets"]:
        lines += ["", *_rows([_target(target) for target in record["targets"]])]
    return lines


def _target(target: Record) -> Record:
    title = Target(target["quantity"], target["of"], _names(target["to"]), target["bound"]).title
    met = target["measured"] <= target["bound"]
    return {"target": title, "bound": f"{target['bound']:g}", "measured": f"{target['measured']:.3g}", "met": met}


def _names(to: str | list[str]) -> str | tuple[str, ...]:
    return to if isinstance(to, str) else tuple(to)
