"""Measure loopax and its peers, write the results, compare them with others, and draw them.

Everything is measured and written unless a part is named, which is only printed. Results are written after each table,
so that an interrupted run keeps what it has. Each version of JAX has results of its own; the page has the newest, and
the version before beside it.

With --short, four small programs in about a minute; with --device, a page of numbers of a device: `--short --help`.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from benchmarks import compare, page, records
from benchmarks.records import Report
from benchmarks.short import options

HERE = Path(__file__).parent
RESULTS = records.of_jax(HERE, version("jax"))
PAGE = HERE / "results.md"


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="measure groups and tables whose title contains this")
    parser.add_argument("--write", action="store_true", help="put what is measured of a part among the results")
    parser.add_argument(
        "--against",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FILE",
        help="compare with this report (the committed one) and fail where something got worse; writes nothing",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="compare this report, and measure nothing")
    parser.add_argument("--figures", action="store_true", help="draw the committed results, and measure nothing")
    parser.add_argument("--list", action="store_true", help="print the titles, and measure nothing")
    chosen = parser.parse_args()
    if chosen.results and not chosen.against:
        parser.error("--results needs --against FILE, which it is compared with")
    if chosen.write and not chosen.part:
        parser.error("--write is for a part: all results are written without it")
    is_measured = not (chosen.results or chosen.figures or chosen.list)
    if chosen.part and not is_measured:
        parser.error("a part is measured: it does not go with --results, --figures or --list")
    if chosen.against and (chosen.write or chosen.figures or chosen.list):
        parser.error("--against writes nothing: it does not go with --write, --figures or --list")
    return chosen


def main() -> None:
    """Do what is asked for."""
    if {argument.partition("=")[0] for argument in sys.argv[1:]} & {"--short", "--device"}:
        sys.exit(options.main(sys.argv[1:]))
    chosen, console = arguments(), Console()
    if chosen.list:
        print(*(item.title for item in _items("")), sep="\n")
    elif chosen.figures:
        draw(console)
    elif chosen.results:
        sys.exit(compared(console, records.read(chosen.against), records.read(chosen.results)))
    elif chosen.against:
        old = records.read(chosen.against)
        new, failed = measured(console, chosen.part, None)
        sys.exit(compared(console, old, new) or bool(failed))
    else:
        is_written = chosen.write or not chosen.part
        _, failed = measured(console, chosen.part, RESULTS if is_written else None)
        if is_written:
            draw(console)
        sys.exit(bool(failed))


def measured(console: Console, part: str, path: Path | None) -> tuple[Report, list[str]]:
    """The report of the items whose titles contain `part`, written as it grows; and the titles of what failed."""
    from benchmarks import run

    items, committed = _items(part), records.read(RESULTS)
    if not items:
        sys.exit(f"No table has {part!r} in its title: `python -m benchmarks --list` prints the titles.")

    def save(report: Report) -> None:
        if path:
            write(records.with_part(committed, report), path)

    try:
        report, failed = run.run(items, console, run.estimates(items, committed), save)
    except KeyboardInterrupt:
        sys.exit(f"\nInterrupted. What was measured is in {path}." if path else "\nInterrupted. Nothing was written.")
    if path and not part:
        write(records.with_whole(committed, report, [item.title for item in items]), path)
    for title in failed:
        console.print(f"Failed: {title}", markup=False)
    return report, failed


def write(report: Report, path: Path) -> None:
    """As JSON, and the page."""
    records.write(report, path)
    write_page()


def write_page() -> None:
    """Of the newest JAX that was measured, and the one before beside it."""
    report, *older = map(records.read, records.newest(HERE))
    page.write(report, PAGE, *older[:1])


def compared(console: Console, old: Report, new: Report) -> int:
    """Print what changed; 1 where something got worse."""
    console.print(f"Before: {records.setting(old)}\nNow: {records.setting(new)}", markup=False)
    found = compare.changes(old, new)
    failing = sum(change.fails for change in found)
    if found:
        console.print(compare.table(found))
    changes = "1 change" if len(found) == 1 else f"{len(found)} changes"
    left = len(compare.unmeasured(old, new))
    console.print(f"{changes} beyond the tolerance, {failing} for the worse. Not measured: {left} tables.")
    return int(failing > 0)


def draw(console: Console) -> None:
    """The figures, and the page."""
    from benchmarks import figures

    write_page()
    newest, *_ = records.newest(HERE)
    for path in figures.draw(records.read(newest), HERE.parent / "docs" / "pictures"):
        console.print(f"Drew {path}", markup=False)


def _items(part: str) -> list:
    from benchmarks import catalogue

    return catalogue.chosen(part)


if __name__ == "__main__":
    main()
