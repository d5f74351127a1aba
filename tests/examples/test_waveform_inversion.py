"""The example inverts, is killed while it computes a gradient, and ends as if nothing had happened."""

import pytest

pytestmark = pytest.mark.slow


def test_a_killed_inversion_ends_with_the_same_bits(example, tmp_path, capsys):
    """`main` compares. The sizes are those of the process that it starts."""
    vars(example).update(CELLS=64, SHOTS=3, STEPS_PER_SHOT=400, ITERATIONS=6, FIGURE=tmp_path / "figure.png")
    example.main()
    assert "the model has the same bits: True" in capsys.readouterr().out
    assert example.FIGURE.exists()


def test_less_disk_takes_more_evaluations(example, tmp_path, monkeypatch):
    """And no more memory than is given."""
    vars(example).update(CELLS=64, SHOTS=3, STEPS_PER_SHOT=400, CHUNK_STEPS=25, MEMORY=3 << 19)
    monkeypatch.setattr("loopax._src.durable.gradient_plan._transfer_seconds", lambda *_: (0.0, 0.0))
    costs = example.budgets(tmp_path / "budgets", example.survey(tmp_path / "survey"))
    evaluations = [cost.evaluations for cost in costs]
    assert evaluations == sorted(evaluations)
    assert evaluations[0] < 2 < evaluations[-1]
    example.show(costs)
