"""The example trains, is killed, and ends as if nothing had happened."""

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("sklearn")


def test_a_killed_run_ends_with_the_same_bits(example, tmp_path, capsys):
    """`main` compares. The width is that of the process that it starts."""
    vars(example).update(UPDATES=600, CHECKPOINT_EVERY=60, WIDTH=256, FIGURE=tmp_path / "figure.png")
    example.main()
    printed = capsys.readouterr().out
    assert "have the same bits: True" in printed
    assert "killed after" in printed
    assert example.FIGURE.exists()
