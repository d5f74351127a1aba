"""Tables on a terminal: with rich where it is installed, as plain text elsewhere."""

import sys
from collections.abc import Collection, Sequence

from loopax._src.extras import is_installed

BAD = "FAILS", "out of range"


def show_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[str] = ()
) -> None:
    """Print a table to stdout; the columns with headers in `numeric` are right-aligned."""
    if not (sys.stdout.isatty() and is_installed("rich")):
        lines = [list(headers), *map(list, rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
        lines.insert(1, ["-" * width for width in widths])
        print(f"{title}\n")
        for line in lines:
            columns = zip(headers, line, widths, strict=True)
            print("  ".join(x.rjust(w) if header in numeric else x.ljust(w) for header, x, w in columns).rstrip())
        print(flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in numeric else "left")
    for row in rows:
        styles = ["green" if cell == "ok" else "bold red" if cell.startswith(BAD) else "" for cell in row]
        table.add_row(*(Text(cell, style=style) for cell, style in zip(row, styles, strict=True)))
    Console().print(table)


def in_words(error: Exception) -> str:
    """The class and the first line of an error, for a cell."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first}"[:200]
