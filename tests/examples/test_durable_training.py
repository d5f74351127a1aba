"""The example trains, is killed, and ends as if nothing had happened."""

import pytest

from tests.support.example_files import load_example

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_precision")]

pytest.importorskip("sklearn")


def test_a_killed_run_ends_with_the_same_bits(tmp_path, capsys):
    """`main` compares. The width is that of the process that it starts."""
    example = load_example("durable_training")
    vars(example).update(UPDATES=600, CHECKPOINT_EVERY=60, WIDTH=256, FIGURE=tmp_path / "figure.png")
    example.main()
    printed = capsys.readouterr().out
    assert "have the same bits: True" in printed
    assert "killed after" in printed
    assert example.FIGURE.exists()
