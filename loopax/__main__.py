"""`python -m loopax`: look whether loopax works here, how fast it is, and what it does."""

import argparse
import os
import sys
from collections.abc import Sequence

from loopax.command import bench, demo, doctor

SUBCOMMANDS = {
    "doctor": (doctor, "versions, devices, a self-test of every transformation, and what XLA copies in loops"),
    "bench": (bench, "loopax beside jax.lax, Equinox, Flax NNX and Diffrax on this machine, in about a minute"),
    "demo": (demo, "cannon shots: loops of unknown length, batched and differentiated, in ten seconds"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser("python -m loopax", description=__doc__)
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="{doctor,bench,demo}")
    for name, (module, words) in SUBCOMMANDS.items():
        module.add_arguments(subparsers.add_parser(name, help=words, description=module.__doc__))
    parsed = parser.parse_args(arguments)
    return SUBCOMMANDS[parsed.subcommand][0].run(parsed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head` has seen enough; Python would write the rest at its end, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
