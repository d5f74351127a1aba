"""The results of `bench --device`, in a file named after the device: kept, read again, and put together.

A report says what it was measured on, has a record for each table and set of flags, and says what was not measured.
"""

import json
import os
import re
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from loopax._src.command.device import Seen
from loopax._src.command.device_flags import ALL, flags_of_user
from loopax._src.command.sizes import BY_NAME

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
