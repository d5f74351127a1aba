"""The file of a device: its name, what is kept of an older run, and that it is whole."""

import json

import pytest

from benchmarks.short import device_page as device_report
from benchmarks.short.device import DEFAULT
from tests.benchmarks.test_device import CPU, GPU
from tests.benchmarks.test_device_page import LOOPS, record, report

FAILURE = {"title": "One loop", "flags": "default", "why": "memory"}


@pytest.mark.parametrize(
    ("kind", "sizes", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "device", "results-nvidia-h100-80gb-hbm3"),
        ("Intel(R) Xeon(R) Processor", "device", "results-intel-r-xeon-r-processor"),
        ("NVIDIA A100-SXM4-40GB", "quick", "results-nvidia-a100-sxm4-40gb-quick"),
    ],
)
def test_files_are_named_after_the_device(kind, sizes, name):
    assert device_report.stem(GPU._replace(kind=kind), sizes) == name


def test_a_record_replaces_the_older_one_in_its_place():
    first, second, new = (record(title, DEFAULT, *LOOPS[:n]) for title, n in [("A", 1), ("B", 1), ("A", 2)])
    found = device_report.with_record(report(first, second), new)
    assert found["records"] == [new, second]
    assert device_report.has(found, "B", "default")
    assert not device_report.has(found, "B", "+WHILE")


def test_a_table_is_measured_or_has_failed():
    measured = record("One loop", DEFAULT, *LOOPS)
    failed = device_report.with_failure(report(measured), FAILURE)
    assert (failed["records"], failed["failed"]) == ([], [FAILURE])
    assert device_report.with_failure(failed, FAILURE)["failed"] == [FAILURE]
    again = device_report.with_record(failed, measured)
    assert (again["records"], again["failed"]) == ([measured], [])


@pytest.mark.parametrize("change", [{}, {"driver": "571"}, {"versions": {"jax": "9"}}])
def test_records_of_the_same_device_and_versions_are_kept(tmp_path, change):
    path, measured = tmp_path / "results.json", record("One loop", DEFAULT, *LOOPS)
    device_report.write(report(measured), path, "page")
    new = device_report.continued(device_report.empty(GPU._replace(**change), "device"), path)
    assert new["records"] == ([] if change else [measured])
    assert path.with_suffix(".md").read_text() == "page"
    assert json.loads(path.read_text())["device"] == GPU._asdict()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results.json", "results.md"]


def test_a_cpu_has_no_flags_of_gpus():
    assert list(device_report.empty(CPU, "device")["flags"]) == ["default"]
