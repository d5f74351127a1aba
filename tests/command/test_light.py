"""`--help` and `--version` import next to nothing; a subcommand imports what it needs, and no peer before it runs."""

import subprocess
import sys

import pytest

IMPORTED = """
import sys
before = set(sys.modules)
from loopax.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
print(*sorted(set(sys.modules) - before))
"""
NOT_FOR_HELP = {"jax", "equinox", "numpy", "scipy"}
PEERS = {"flax", "optax", "diffrax", "lineax", "matplotlib", "rich", "orbax", "tqdm", "benchmarks", "blackjax"}


def imported(*arguments):
    command = [sys.executable, "-c", IMPORTED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_imports_next_to_nothing(arguments):
    found = imported(*arguments)
    assert {name for name in found if name.partition(".")[0] in NOT_FOR_HELP | PEERS} == set()
    assert len(found) < 120  # argparse and what it needs; JAX alone is several hundred


@pytest.mark.parametrize("name", ["doctor", "demo", "calibrate"])
def test_help_of_a_subcommand_imports_no_peer(name):
    found = imported(name, "--help")
    assert {module for module in found if module.partition(".")[0] in PEERS} == set()
    assert "loopax._src.public" not in found  # which takes as long as JAX: what is public is imported when it is used
