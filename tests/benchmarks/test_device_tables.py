"""The tables of `bench --device`: with tiny sizes all programs run, and compute the same."""

import pytest

from benchmarks.short import device_worker, programs
from benchmarks.short.device_worker import BY_TITLE, TABLES
from benchmarks.short.measure import BY_NAME, QUICK
from tests.support.example_files import precision_of_a_user

OF_BENCH = [table for table in TABLES if table.build in programs.programs()]  # tested in test_bench.py
SMALL = ["One loop of two flops", "Condition every k steps: two flops, a batch"]
OTHERS = [table.title for table in TABLES if table not in OF_BENCH and table.title not in SMALL]


@pytest.mark.parametrize("title", [*SMALL, *(pytest.param(title, marks=pytest.mark.slow) for title in OTHERS)])
def test_all_programs_compute_the_same(title):
    with precision_of_a_user():
        record = device_worker.measured(title, QUICK)
    assert record["title"] == title
    first, *_ = record["rows"]
    assert first["library"].startswith("loopax")
    assert first["ratio"] == 1.0
    assert [(row["library"], row["note"]) for row in record["rows"] if row["note"]] == []
    assert all(row["milliseconds"] > 0 and row["temporary_mib"] is not None for row in record["rows"])


def test_titles_are_of_one_table_each():
    assert len(BY_TITLE) == len(TABLES)


def test_sizes_have_names_and_a_device_takes_few_steps():
    assert set(BY_NAME) == {"device", "quick"}
    # 50 microseconds a step, and three times as many evaluations in a gradient: less than a second
    assert 3 * 50e-6 * max(BY_NAME["device"].loop_steps, BY_NAME["device"].gradient_steps) < 1
