"""Tables: plain text, or rich on a terminal that has it."""

import io
import sys

import pytest

from loopax.__main__ import main
from loopax._command.table import show_table

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


def test_rich_on_a_terminal(monkeypatch):
    text = shown(Terminal(), monkeypatch)
    assert "┏━━━" in text
    assert "│ numpy │" in text


def test_a_terminal_without_rich(monkeypatch):
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
