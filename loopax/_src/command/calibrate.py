"""`python -m loopax calibrate FILE`: measure what operations cost on this machine, for `Auto()` and `lanes="auto"`.

loopax uses the file after `lx.set_calibration(FILE)`, or if the environment variable LOOPAX_CALIBRATION names the file.
"""

import argparse
import sys
from pathlib import Path

from loopax._src import calibration
from loopax._src.command import probes
from loopax._src.command.machine import machine
from loopax._src.command.table import show_table

HEADERS = ["operation", "ns", "times as slow as expected"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to write it."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write, such as loopax.json")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write; the exit code is 2 where the file cannot be written, else 0."""
    if not arguments.file.parent.is_dir():
        print(f"{arguments.file}: there is no folder {arguments.file.parent}", file=sys.stderr)
        return 2
    found = probes.measured()
    rows = [[", ".join(p.constants), f"{p.nanoseconds:.3g}", f"{p.times:.2f}"] for p in found]
    show_table(f"Operations on {machine()}", HEADERS, rows, numeric=HEADERS[1:])
    calibration.write(arguments.file, probes.scaled(found), machine())
    print(f"Wrote {arguments.file}. Give it to lx.set_calibration, or name it in the variable {calibration.VARIABLE}.")
    return 0
