"""The example trains, is killed, and ends as if nothing had happened."""

import numpy as np
import pytest

from loopax import durable
from tests.support.example_files import load_example

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_precision")]

pytest.importorskip("sklearn")


@pytest.fixture
def example(tmp_path):
    """A shorter run, and a figure elsewhere."""
    module = load_example("durable_training")
    vars(module).update(UPDATES=600, CHECKPOINT_EVERY=60, WIDTH=32, FIGURE=tmp_path / "figure.png")
    return module


def test_it_learns_and_its_losses_are_on_disk(example, tmp_path):
    example.UPDATES = 200
    result = example.train(tmp_path / "run")
    assert result.accuracy > 0.8
    assert result.losses[-20:].mean() < 0.5 * result.losses[:20].mean()
    assert np.array_equal(example.losses_so_far(tmp_path / "run"), result.losses)
    assert durable.steps_saved(tmp_path / "run") == 200


def test_a_killed_run_ends_with_the_same_bits(example, capsys):
    """`main` compares."""
    example.WIDTH = 256  # that of the process that it starts
    example.main()
    printed = capsys.readouterr().out
    assert "have the same bits: True" in printed
    assert "killed after" in printed
    assert example.FIGURE.exists()
