"""`python -m loopax`: check whether loopax works on this machine, and see what it does."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from loopax._version import __version__

SUBCOMMANDS = {
    "doctor": "versions, devices, a self-test of every transformation, and what XLA copies in loops",
    "calibrate": 'measure what operations cost on this machine, and write a file for Auto() and lanes="auto"',
    "demo": "cannon shots: loops of unknown length, batched and differentiated, in less than half a minute",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m loopax", description=__doc__)
    parser.add_argument("--version", action="version", version=f"loopax {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="{doctor,calibrate,demo}")
    for name, words in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=words)
        if name in given:  # the others need not be imported, and JAX takes seconds
            module = import_module(f"loopax._command.{name}")
            subparser.description = module.__doc__
            if name == "calibrate":
                subparser.add_argument("file", type=Path, metavar="FILE", help="the file to write, such as loopax.json")
            subparser.set_defaults(run=module.run)
    if given[:1] == ["bench"]:
        parser.error("benchmarks stand in the repository: in a clone, `python -m benchmarks --short`")
    parsed = parser.parse_args(given)
    return parsed.run(parsed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head` has seen enough; Python would write the rest at its end, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
