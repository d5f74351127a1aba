"""Measure one table of `bench --device`, and print it as JSON: a table that fails or hangs takes no other with it.

`python -m loopax._src.command.device_worker TITLE SIZES` is that process.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from loopax._src.command.device_tables import BY_TITLE
from loopax._src.command.measure import Measurement, measure
from loopax._src.command.sizes import BY_NAME, Sizes


def measured(title: str, sizes: Sizes) -> dict[str, Any]:
    """Return the table as a record."""
    program = BY_TITLE[title].build(sizes)
    rows = measure(program, sizes.rounds, warm=sizes.warm, seconds=sizes.seconds)
    return record(title, program.name, rows)


def record(title: str, about: str, rows: Sequence[Measurement]) -> dict[str, Any]:
    """Return what was measured, as it is written to a file."""
    return {"title": title, "about": about, "rows": [_row(row) for row in rows]}


def _row(row: Measurement) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "program"}


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], BY_NAME[sys.argv[2]])))
