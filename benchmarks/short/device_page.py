"""The results of `bench --device` as a page of Markdown. In each table the column that decides stands second."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.short.device import ALL, DEFAULT, Seen, flags_of_user
from benchmarks.short.measure import BY_NAME, numbers, used_columns

# The results of `bench --device`, in a file named after the device: kept, read again, and put together.
#
# A report says what it was measured on, has a record for each table and set of flags, and says what was not measured.


Report = dict[str, Any]
Record = dict[str, Any]


def stem(seen: Seen, sizes: str) -> str:
    """Return what the files are called, as `results-nvidia-h100-80gb-hbm3`."""
    name = re.sub(r"[^a-z0-9]+", "-", seen.kind.lower()).strip("-")
    return f"results-{name}" if sizes == "device" else f"results-{name}-{sizes}"


def empty(seen: Seen, sizes: str) -> Report:
    """Return a report without records."""
    flags = {flags.name: " ".join(flags.xla) for flags in ALL if seen.platform in flags.platforms}
    about = {"device": seen._asdict(), "xla_flags": flags_of_user(), "flags": flags, "sizes": asdict(BY_NAME[sizes])}
    return {**about, "date": date.today().isoformat(), "records": [], "failed": []}


def continued(new: Report, path: Path) -> Report:
    """Return the new report with the records of the file, if that is of the same device, versions, flags and sizes."""
    old = json.loads(path.read_text()) if path.exists() else {}
    is_same = all(old.get(key) == new[key] for key in ("device", "xla_flags", "flags", "sizes"))
    return new | {key: old[key] for key in ("records", "failed")} if is_same else new


def has(report: Report, title: str, flags: str) -> bool:
    """Return whether the report has a record of this table and these flags."""
    return any(_key(record) == (title, flags) for record in report["records"])


def with_record(report: Report, record: Record) -> Report:
    """Return the report with a record in the place of an older one of the same table and flags, else at the end."""
    others = [old for old in report["records"] if _key(old) != _key(record)]
    places = [i for i, old in enumerate(report["records"]) if _key(old) == _key(record)]
    others.insert(places[0] if places else len(others), record)
    return report | {"records": others, "failed": _without(report["failed"], record)}


def with_failure(report: Report, failure: Record) -> Report:
    """Return the report with a table that could not be measured, and without what an older run has measured of it."""
    failed = [*_without(report["failed"], failure), failure]
    return report | {"records": _without(report["records"], failure), "failed": failed}


def write(report: Report, path: Path, page: str) -> None:
    """Write the report and its page, each as a whole: an interruption leaves the old files."""
    for file, text in ((path, json.dumps(report, indent=1) + "\n"), (path.with_suffix(".md"), page)):
        new = file.with_name(f"{file.name}.new")
        new.write_text(text)
        os.replace(new, file)


def _key(record: Record) -> tuple[str, str]:
    return record["title"], record["flags"]


def _without(records: list[Record], record: Record) -> list[Record]:
    return [old for old in records if _key(old) != _key(record)]


Row = dict[str, Any]
COLUMNS = ["program", "x first row", "ms", "us a step", "temporary MiB", "compile s", "note"]
NUMBERS = COLUMNS[1:-1]
NOTES = """Times are medians. All programs of a table ran in turn, in one process, on one device. *x first row* is the
time over that of the first row, which is a program of loopax: more than 1 is slower. *Compile s* includes tracing;
temporary memory is what XLA reports. *Static n*: the number of steps is a constant of the compiled program. Elsewhere
it is a value."""


def page(report: Report) -> str:
    """Return the page."""
    records = report["records"]
    titles = list(dict.fromkeys(record["title"] for record in records))
    sections = [_about(report), NOTES, *_compared(records)]
    for title in titles:
        sections.append(f"## {title}")
        sections += [_section(record, report["flags"]) for record in records if record["title"] == title]
    return "\n\n".join([*sections, *_failed(report["failed"])]) + "\n"


def columns(record: Record) -> tuple[list[str], list[list[str]]]:
    """Return the headers and the rows of a record, without columns in which nothing stands."""
    return used_columns(COLUMNS, [_cells(row) for row in record["rows"]])


def _cells(row: Row) -> list[str]:
    steps = row["steps_per_second"]
    values = [
        (row["ratio"], ".2f"),
        (row["milliseconds"], ".3g"),
        (1e6 / steps if steps else None, ".3g"),
        (row["temporary_mib"], ".2f"),
        (row["compile_seconds"], ".2f"),
    ]
    return [row["library"], *numbers(values), row["note"]]


# ---- sections


def _about(report: Report) -> str:
    seen = report["device"]
    facts = {
        "device": f"{seen['devices']}; {seen['processor']}",
        "driver": seen["driver"],
        "runtime": seen["runtime"],
        "versions": ", ".join(f"{name} {version}" for name, version in seen["versions"].items()),
        "flags of XLA": "; ".join(f"{name}: `{xla}`" if xla else name for name, xla in report["flags"].items()),
        "other flags in XLA_FLAGS": " ".join(f"`{flag}`" for flag in report["xla_flags"]),
        "measured": report["date"],
    }
    title = seen["kind"] if report["sizes"]["rounds"] > 1 else f"{seen['kind']}, tiny sizes: these are no measurements"
    command = f"`python -m benchmarks --device {seen['platform']}`"
    lines = markdown(["", ""], [[name, value] for name, value in facts.items() if value])
    return f"# {title}\n\nWritten by {command}.\n\n{lines}"


def _section(record: Record, flags: dict[str, str]) -> str:
    xla = flags[record["flags"]]
    about = record["about"][:1].upper() + record["about"][1:]
    words = f"{about}. Flags: {record['flags']}" + (f" (`{xla}`)" if xla else "")
    return f"{words}.\n\n{markdown(*columns(record))}"


def _compared(records: Sequence[Record]) -> list[str]:
    """Return what other flags change: the time of each program, over that with the flags of XLA as they are."""
    others = list(dict.fromkeys(record["flags"] for record in records if record["flags"] != DEFAULT.name))
    times = {(record["title"], record["flags"]): _times(record) for record in records}
    rows = []
    for title in dict.fromkeys(title for title, flags in times if flags != DEFAULT.name):
        before = times.get((title, DEFAULT.name), {})
        for program, ms in before.items():
            after = [times.get((title, flags), {}).get(program) for flags in others]
            rows.append([program, *("" if now is None else f"{now / ms:.2f}" for now in after), title])
    if not rows:
        return []
    words = (
        "Time with these flags, over the time with the flags of XLA as they are. Each set runs in processes of its own."
    )
    return [f"## What flags change\n\n{words}\n\n{markdown(['program', *others, 'table'], rows)}"]


def _times(record: Record) -> dict[str, float]:
    return {row["library"]: row["milliseconds"] for row in record["rows"] if row["milliseconds"] is not None}


def _failed(failed: Sequence[Record]) -> list[str]:
    if not failed:
        return []
    rows = [[failure["title"], failure["why"], failure["flags"]] for failure in failed]
    return [f"## Not measured\n\n{markdown(['table', 'why', 'flags'], rows)}"]


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [headers, ["---"] * len(headers), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
