"""Durable loops show how far they are, in one bar for all chunks."""

import re

import jax.numpy as jnp
import pytest

import loopax as lx
from loopax import durable
from loopax._src.durable import pace


def run(directory, length, progress, body=lambda _, x: x + 1):
    return durable.fori_loop(
        0, length, body, jnp.zeros(()), directory=directory, chunk_steps=10, progress=progress, checkpoint_every=500
    )


def lines(text):
    return re.findall(r"^(\S.*): (\d+) steps in ", text, re.MULTILINE)


def test_a_line_at_the_end_and_none_without(tmp_path, capfd):
    assert run(tmp_path / "silent", 100, None) == 100
    assert capfd.readouterr().err == ""
    assert run(tmp_path / "shown", 100, lx.Progress("training", style="text")) == 100
    assert lines(capfd.readouterr().err)[-1] == ("training", "100")


def test_a_resumed_run_counts_from_where_it_goes_on(tmp_path, capfd):
    run(tmp_path / "run", 100, None)
    assert run(tmp_path / "run", 150, lx.Progress(style="text")) == 150
    assert lines(capfd.readouterr().err)[-1] == ("durable.fori_loop", "50")


def test_a_resumed_run_says_after_how_many_it_goes_on_also_where_it_is_finished(tmp_path, capfd):
    run(tmp_path / "run", 100, None)
    run(tmp_path / "run", 150, lx.Progress("resumed", style="text"))
    assert re.search(r"50 steps in \S+, .* steps/s, after 100 that were saved$", capfd.readouterr().err, re.MULTILINE)
    run(tmp_path / "run", 150, lx.Progress("again", style="text"))
    assert capfd.readouterr().err == "again: 0 steps in 0:00:00, after 150 that were saved\n"


def test_it_is_closed_where_the_run_stops(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(pace, "_MOST_IN_A_ROW", 1)  # steps take no time here
    progress = lx.Progress("stopped", style="text")
    too_few = lambda i, x: lx.fori_loop(0, i, lambda _, x: x + 1, x, max_steps=30)
    with pytest.raises(Exception, match="max_steps=30"):
        run(tmp_path / "run", 100, progress, too_few)
    assert "stopped: last seen after 30/100 steps" in capfd.readouterr().err
