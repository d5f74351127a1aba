"""The command itself: `--help` imports next to nothing, a subcommand no peer before it runs; its tables."""

import io
import subprocess
import sys

import pytest

from loopax.__main__ import main
from loopax._command.table import show_table

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


# ---- tables: plain text, or rich on a terminal that has it


ROWS = [["jax", "0.10", "ok"], ["numpy", "12", "FAILS: no"]]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    show_table("Versions", ["name", "number", ""], ROWS, numeric=["number"])
    return stream.getvalue()


def test_plain_text(monkeypatch):
    lines = shown(io.StringIO(), monkeypatch).split("\n")
    assert lines[0] == "Versions"
    assert lines[2:6] == [
        "name   number",
        "-----  ------  ---------",
        "jax      0.10  ok",
        "numpy      12  FAILS: no",
    ]


def test_rich_on_a_terminal_that_has_it(monkeypatch):
    text = shown(Terminal(), monkeypatch)
    assert "┏━━━" in text
    assert "│ numpy │" in text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "-----  ------" in shown(Terminal(), monkeypatch)


@pytest.mark.parametrize("arguments", [[], ["cure"]])
def test_no_such_subcommand(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "doctor,calibrate,demo" in capsys.readouterr().err


def test_bench_says_where_it_has_gone(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--device", "gpu"])
    assert ended.value.code == 2
    assert "`python -m benchmarks --short`" in capsys.readouterr().err
