"""What changed between two reports: targets, memory and counts; times only as ratios to a peer in the same run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.groups import Target, is_peer
from benchmarks.page import cell
from benchmarks.records import KINDS, Record, Report, by_title

TIMES, EXACTLY = 0.25, 0.01  # how far ratios of times, and memory and counts, may be from what they were


@dataclass(frozen=True)
class Change:
    """What is not as it was."""

    title: str  # of the record
    what: str
    before: Any
    now: Any
    verdict: str
    fails: bool = False


def changes(old: Report, new: Report, times: float = TIMES) -> list[Change]:
    """Of all records that both have, in the order of the old ones; what only one has is no change.

    Ratios of times are listed from `times` on (0.25: a quarter more, or a fifth less), memory and counts from 1 % on.
    It fails where a target was met and is not, and where memory or a count of loopax's own got worse. Memory is not
    compared between devices of different kinds.
    """
    found: list[Change] = []
    for kind in KINDS:
        latest = by_title(new, kind)
        for title, before in by_title(old, kind).items():
            if title in latest:
                is_same_device = _device(before, old) == _device(latest[title], new)
                found += _of_record(before, latest[title], times, is_same_device)
    return found


def unmeasured(old: Report, new: Report) -> list[str]:
    """The titles that only the old report has."""
    return [title for kind in KINDS for title in by_title(old, kind) if title not in by_title(new, kind)]


def table(found: Iterable[Change]) -> Table:
    """To be printed."""
    shown = Table("", "what", "before", "now", "change", "")
    title = ""
    for c in found:
        shown.add_row(
            c.title if c.title != title else "", c.what, cell(c.before), cell(c.now), _percent(c), _verdict(c)
        )
        title = c.title
    return shown


def _verdict(change: Change) -> str:
    return f"[red]{change.verdict}[/]" if change.fails else change.verdict


def _percent(change: Change) -> str:
    if isinstance(change.before, bool) or not change.before or change.now is None:
        return ""
    return f"{100 * (change.now / change.before - 1):+.0f} %"


def _device(record: Record, report: Report) -> str:
    """The backend, from the versions: "jax 0.10.2, equinox 0.13.8, cpu, float32"."""
    return record.get("setting", report["versions"]).split(", ")[-2]


def _of_record(old: Record, new: Record, times: float, is_same_device: bool) -> Iterator[Change]:
    if "programs" in new:
        yield from _of_targets(old, new, times, is_same_device)
        if is_same_device:
            yield from _of_memory(old, new)
    elif "rows" in new:
        yield from _of_rows(old, new, is_same_device)
    else:
        whole = {name: value for name, value in new["values"].items() if " / " not in name}  # ratios follow from these
        yield from _of_counts(new["title"], "", old["values"], whole)


# ---- programs


def _of_targets(old: Record, new: Record, times: float, is_same_device: bool) -> Iterator[Change]:
    before = {_identity(target): target for target in old["targets"]}
    for now in new["targets"]:
        is_memory = now["attribute"] == "temporary_mib"
        if _identity(now) in before and (is_same_device or not is_memory):
            tolerance = EXACTLY if is_memory else times
            yield from _of_target(new["title"], before[_identity(now)], now, tolerance)


def _identity(target: Record) -> tuple[Any, ...]:
    to = target["to"]
    return target["of"], to if isinstance(to, str) else tuple(to), target["attribute"]


def _of_target(title: str, old: Record, new: Record, tolerance: float) -> Iterator[Change]:
    was_met, is_met = (target["measured"] <= target["bound"] for target in (old, new))
    factor = new["measured"] / old["measured"]
    to = new["to"] if isinstance(new["to"], str) else tuple(new["to"])
    what = Target(new["quantity"], new["of"], to, new["bound"]).title
    about = title, what, old["measured"], new["measured"]
    if was_met and not is_met:
        yield Change(*about, f"was met, is not (bound {new['bound']:g})", fails=True)
    elif is_met and not was_met:
        yield Change(*about, f"is met now (bound {new['bound']:g})")
    elif _is_beyond(factor, tolerance):
        yield Change(*about, "more" if factor > 1 else "less")


def _is_beyond(factor: float, tolerance: float) -> bool:
    return factor > 1 + tolerance or factor < 1 / (1 + tolerance)


def _of_memory(old: Record, new: Record) -> Iterator[Change]:
    before = {program["name"]: program["temporary_mib"] for program in old["programs"]}
    for program in new["programs"]:
        name, now = program["name"], program["temporary_mib"]
        if name in before and abs(now - before[name]) > EXACTLY * before[name]:
            yield _change(new["title"], f"temporary MiB: {name}", before[name], now, is_peer(name))


def _change(title: str, what: str, before: float, now: float, is_of_peer: bool = False) -> Change:
    is_worse = now > before
    verdict = f"{'more' if is_worse else 'less'}{', of a peer' if is_of_peer else ''}"
    return Change(title, what, before, now, verdict, is_worse and not is_of_peer)


# ---- other tables


def _of_rows(old: Record, new: Record, is_same_device: bool) -> Iterator[Change]:
    counts = [*new.get("counts", []), *(new.get("memory", []) if is_same_device else [])]
    before = dict(_named(old["rows"]))
    for name, now in _named(new["rows"]):
        row = before.get(name, {})
        yield from _of_counts(new["title"], name, *({c: r[c] for c in counts if c in r} for r in (row, now)))
        for column, value in now.items():
            if row.get(column) is True and value is False:
                yield Change(new["title"], _joined(name, column), True, False, "was met, is not", fails=True)
            elif row.get(column) is False and value is True:
                yield Change(new["title"], _joined(name, column), False, True, "is met now")


def _named(rows: list[Record]) -> Iterator[tuple[str, Record]]:
    """Each row with its words as its name, and a number where several are called so."""
    seen: dict[str, int] = {}
    for row in rows:
        words = [value for value in row.values() if isinstance(value, str)]
        name = ", ".join(words)
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name} ({seen[name]})", row


def _of_counts(title: str, name: str, old: Record, new: Record) -> Iterator[Change]:
    for column, now in new.items():
        before = old.get(column)
        if not isinstance(before, int | float) or not isinstance(now, int | float):
            continue
        if abs(now - before) > EXACTLY * abs(before):
            yield _change(title, _joined(name, column), before, now)


def _joined(name: str, column: str) -> str:
    return ": ".join(part for part in (name, column) if part)
