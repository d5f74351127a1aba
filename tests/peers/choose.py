"""Choose the tests of Diffrax for `make peers-quick`: `python tests/peers/choose.py REPORT.xml ...`, into `quick.toml`.

The reports are those of pytest's `--junitxml`, of runs with `--some candidates`: of each test, what it reaches and how
long it takes (`exchange.py`). First comes the fastest case of each test function that reaches a gradient, then that of
each other one, then further cases, the fastest first. A test that takes too long is left out, and one that compiles
nothing.
"""

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

NUMBER = 40
SECONDS = 0.5, 150.0  # of a test
QUICK = Path(__file__).parent / "quick.toml"
HEAD = "# Written by choose.py: tests of Diffrax that reach a gradient, an event or a batch of a loop, by file.\n"


class Case(NamedTuple):
    """A test, with its parameters."""

    file: str
    name: str
    reaches: str
    seconds: float

    @property
    def function(self) -> tuple[str, str]:
        """The test without its parameters."""
        return self.file, self.name.split("[")[0]


def cases(report: Path) -> Iterator[Case]:
    """Those of a report that passed."""
    for case in ET.parse(report).iter("testcase"):
        found = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        failed = any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
        if found.get("reaches") and not failed:
            file = case.get("classname", "").split(".")[-1]
            yield Case(file, case.get("name", ""), found["reaches"], float(found["seconds"]))


def chosen(found: Sequence[Case]) -> list[Case]:
    """At most so many, by what they cover and by time."""
    least, most = SECONDS
    fast = sorted((case for case in found if least <= case.seconds <= most), key=lambda case: case.seconds)
    first = {case.function: case for case in reversed(fast)}.values()
    order = lambda case: (case not in first, "gradient" not in case.reaches, case.seconds)
    return sorted(sorted(fast, key=order)[:NUMBER])


def text(found: Sequence[Case]) -> str:
    """The file, with what each test reaches, and its seconds."""
    lines = [HEAD]
    for file in sorted({case.file for case in found}):
        lines.append(f"{file} = [")
        of_file = [case for case in found if case.file == file]
        lines += [f"    {json.dumps(case.name)}, # {case.reaches}: {case.seconds:.0f} s" for case in of_file]
        lines.append("]\n")
    return "\n".join(lines)


if __name__ == "__main__":
    QUICK.write_text(text(chosen([case for report in sys.argv[1:] for case in cases(Path(report))])))
