"""`python -m benchmarks --short`: loopax beside its peers on this machine, in about a minute.

Small programs, measured in turn in one run: what counts are the ratios. With --device, more tables with several flags
of XLA, written to a file named after the device, in less than twenty minutes. The benchmark by which loopax is
developed is larger: `python -m benchmarks` without any of the two.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.short.measure import MINUTES
from loopax._src.extras import optional

HERE, OF_DEVICE = ("json", "figure"), ("list", "quick", "only", "minutes", "to")  # options without and with --device


def main(given: Sequence[str]) -> int:
    """Do what these arguments say; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(given))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to measure, and where to write what was measured."""
    parser.add_argument("--short", action="store_true", help="four programs, in about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, the machine and the versions")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw time and memory (.png or .svg; needs matplotlib)"
    )
    of_device = parser.add_argument_group("a page of numbers of a device")
    add = of_device.add_argument
    add("--device", choices=["cpu", "gpu"], help="measure all tables on such a device, and write its page")
    add("--list", action="store_true", default=None, help="print the tables and the flags, and measure nothing")
    add("--only", metavar="PART", help="measure tables whose title contains this; others stay in the file")
    add("--quick", action="store_true", default=None, help="tiny sizes: does everything run? No measurement")
    add("--minutes", type=float, help=f"begin no further table after so many minutes ({MINUTES})")
    add("--to", type=Path, metavar="FOLDER", help="write the files there (benchmarks/ in a clone, else here)")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and write what is asked for; the exit code is 2 where the options cannot be met."""
    problem = _problem(arguments)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    if arguments.device:  # what follows imports JAX, which takes half a second: --help does without
        from benchmarks.short import device_bench

        return device_bench.run(arguments)
    from benchmarks.short import beside_peers

    return beside_peers.run(arguments)


def _problem(arguments: argparse.Namespace) -> str:
    """Return what would make the files fail, known before anything is measured; nothing where all is well."""
    not_for_this = [name for name in (HERE if arguments.device else OF_DEVICE) if getattr(arguments, name) is not None]
    if not_for_this:
        return f"--{not_for_this[0]} {'does not go with' if arguments.device else 'needs'} --device"
    if arguments.to and not arguments.to.is_dir():
        return f"there is no folder {arguments.to}"
    for path in filter(None, (arguments.json, arguments.figure)):
        if not path.parent.is_dir():
            return f"{path}: there is no folder {path.parent}"
    try:
        if arguments.figure:
            optional("matplotlib", "matplotlib", "bench --figure")
    except ImportError as error:
        return str(error)
    return ""
