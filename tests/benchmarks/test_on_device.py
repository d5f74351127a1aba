"""The tables that `python -m benchmarks --device` takes from this benchmark: they exist, and give records."""

import importlib
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import on_device, records
from benchmarks.groups import Group, Target
from benchmarks.measure import Case
from tests.support.example_files import precision_of_a_user

ROOT = Path(on_device.__file__).parents[1]


def test_tables_are_those_of_the_committed_results():
    committed = records.by_title(records.read(ROOT / "benchmarks" / "results.json"), "groups")
    titles = [title for _, _, title in on_device.TABLES]
    assert set(titles) <= set(committed)
    assert len(set(titles)) == len(titles)


def test_the_program_that_has_a_target_is_the_first_row(monkeypatch):
    cases = [Case("lax.scan", jnp.sin, (jnp.ones(2),)), Case("loopax", jnp.cos, (jnp.ones(3),))]
    targets = [Target("time", "loopax", "lax.scan", 1.0)]
    module = type("Module", (), {"groups": staticmethod(lambda: [Group("Sines", cases, targets, steps=7)])})
    monkeypatch.setattr(importlib, "import_module", lambda _: module)
    record = on_device.measured("sines", "Sines")
    assert [row["library"] for row in record["rows"]] == ["loopax", "lax.scan"]
    assert record["rows"][0]["ratio"] == 1.0
    assert all(row["note"] == "" and row["steps_per_second"] > 0 for row in record["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _, _ in on_device.TABLES}))
def test_tables_stand_in_these_modules(name):
    with precision_of_a_user():
        groups = {group.title: group for group in importlib.import_module(f"benchmarks.{name}").groups()}
    for title in [title for module, _, title in on_device.TABLES if module == name]:
        first = groups[title].targets[0].of
        assert first in [case.name for case in groups[title].cases]
