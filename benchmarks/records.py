"""Results as they are written: read, put together and written again.

A report has the machine, the versions, and records under "groups", "tables" and "counts". A record of another machine,
or of other versions, says so under "setting".
"""

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Report = dict[str, Any]

KINDS = ("groups", "tables", "counts")


def of_jax(folder: Path, version: str) -> Path:
    """The report of a version of JAX: `results-jax-0.12.json` for each 0.12."""
    return folder / f"results-jax-{'.'.join(version.split('.')[:2])}.json"


def newest(folder: Path) -> list[Path]:
    """The reports of all versions of JAX in a folder, the newest first."""
    number = lambda path: [int(part) for part in path.stem.removeprefix("results-jax-").split(".")]
    return sorted(folder.glob("results-jax-*.json"), key=number, reverse=True)


def read(path: Path) -> Report:
    """A report; an empty one where there is none."""
    if not path.exists():
        return {"machine": "", "versions": "", **{kind: [] for kind in KINDS}}
    return json.loads(path.read_text())


def write(report: Report, path: Path) -> None:
    """All of it or nothing: an interruption leaves the old file."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(new, path)


def setting(report: Report) -> str:
    """The machine and the versions."""
    return f"{report['machine']}. {report['versions']}"


def by_title(report: Report, kind: str) -> dict[str, Record]:
    """The records of a kind."""
    return {record["title"]: record for record in report[kind]}


def with_part(old: Report, new: Report) -> Report:
    """The old report with the new records in the places of those with the same titles, others behind."""
    elsewhere = {} if setting(new) == setting(old) else {"setting": setting(new)}
    return old | {kind: _merged(old[kind], [record | elsewhere for record in new[kind]]) for kind in KINDS}


def with_whole(old: Report, new: Report, titles: list[str]) -> Report:
    """The new report; what it lacks of these titles (it failed) is taken from the old one, and says where from."""
    elsewhere = {} if setting(new) == setting(old) else {"setting": setting(old)}
    whole = dict(new)
    for kind in KINDS:
        found = by_title(new, kind)
        kept = {title: elsewhere | record for title, record in by_title(old, kind).items() if title not in found}
        together = kept | found
        whole[kind] = [together[title] for title in titles if title in together]
    return whole


def _merged(old: list[Record], new: list[Record]) -> list[Record]:
    found = {record["title"]: record for record in new}
    kept = [found.pop(record["title"], record) for record in old]
    return [*kept, *found.values()]
