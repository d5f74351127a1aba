"""Tables on a terminal: with rich where it is installed, as plain text elsewhere."""

import sys
from collections.abc import Collection, Sequence

from loopax._src.extras import is_installed

GOOD, BAD = ("ok",), ("FAILS", "out of range")


def show_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[str] = ()
) -> None:
    """Print a table to stdout; the columns with headers in `numeric` are right-aligned."""
    if sys.stdout.isatty() and is_installed("rich"):
        _with_rich(title, headers, rows, numeric)
    else:
        print(as_text(title, headers, rows, numeric) + "\n", flush=True)


def as_text(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[str] = ()) -> str:
    """A table of plain text, with a line under the headers."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])

    def text(line: list[str]) -> str:
        columns = zip(headers, line, widths, strict=True)
        return "  ".join(cell.rjust(w) if header in numeric else cell.ljust(w) for header, cell, w in columns).rstrip()

    return "\n".join([title, "", *map(text, lines)])


def used_columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the headers and the rows without columns in which nothing stands."""
    used = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    return [headers[i] for i in used], [[row[i] for i in used] for row in rows]


def numbers(values: Sequence[tuple[float | None, str]]) -> list[str]:
    """Return each number in its format; nothing for None."""
    return ["" if value is None else format(value, how) for value, how in values]


def _with_rich(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in numeric else "left")
    for row in rows:
        table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
    Console().print(table)


def _style(cell: str) -> str:
    if cell in GOOD:
        return "green"
    return "bold red" if cell.startswith(BAD) else ""


def in_words(error: Exception) -> str:
    """The class and the first line of an error, for a cell."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first}"[:200]
