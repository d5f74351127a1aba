"""`python -m benchmarks --device`: its flags of XLA, its page and file; every table is measured, or has failed."""

import json
import subprocess
import sys

import pytest

from benchmarks.short import device, device_jobs, device_page, device_worker, programs
from benchmarks.short.device import ALL, DEFAULT, LOOPS_AS_GRAPHS, Seen, environment, flags_of_user
from benchmarks.short.device_jobs import Job, JobFailedError
from benchmarks.short.device_worker import TABLES
from benchmarks.short.measure import QUICK
from benchmarks.short.options import main
from tests.support.example_files import precision_of_a_user

CPU = Seen("cpu", "8 x cpu", "A Processor", "A Processor (2 logical cores)", "cpu", "", {"jax": "1", "jaxlib": "2"})
GPU = CPU._replace(platform="gpu", devices="2 x NVIDIA H100", kind="NVIDIA H100", runtime="cuda 12090", driver="570.1")


def test_flags_of_the_user_stay_but_for_those_that_are_compared(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one=1 --xla_gpu_enable_command_buffer=FUSION --two")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert len({flags.name for flags in ALL}) == len(ALL)
    assert flags_of_user() == ["--one=1", "--two"]
    found = environment(DEFAULT, "gpu")
    assert found["XLA_FLAGS"] == "--one=1 --two"
    assert "JAX_PLATFORMS" not in found  # a GPU is what JAX takes, and a CPU is asked for by name
    assert environment(DEFAULT, "cpu")["JAX_PLATFORMS"] == "cpu"
    found = environment(LOOPS_AS_GRAPHS, "gpu")["XLA_FLAGS"]
    assert found == "--one=1 --two --xla_gpu_enable_command_buffer=+WHILE"


@pytest.mark.parametrize("value", ["+WHILE", "+BANANA"])
def test_xla_takes_these_flags_and_refuses_others(monkeypatch, value):
    """XLA reads flags for GPUs also where there is none."""
    assert "--xla_gpu_enable_command_buffer=+WHILE" in ALL[-1].xla
    variables = environment(ALL[-1], "cpu")
    variables["XLA_FLAGS"] = variables["XLA_FLAGS"].replace("+WHILE", value)
    command = [sys.executable, "-c", "import jax; jax.devices(); jax.jit(abs).lower(1.0).compile()"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (value == "+WHILE"), done.stderr[-500:]


def row(library, milliseconds, ratio, **others):
    values = {"temporary_mib": 0.5, "compile_seconds": 0.25, "steps_per_second": None, "note": ""}
    return {"library": library, "milliseconds": milliseconds, "ratio": ratio} | values | others


def record(title, flags, *rows):
    return {"title": title, "flags": flags.name, "about": "forward, 9 steps", "rows": list(rows), "seconds": 1.0}


LOOPS = [row("loopax", 2.0, 1.0, steps_per_second=1e4), row("Equinox", 8.0, 4.0), row("lax", None, None, note="A | B")]


def report(*records):
    return device_page.empty(GPU, "device") | {"records": list(records)}


def test_the_column_that_decides_stands_second():
    page = device_page.page(report(record("One loop", DEFAULT, *LOOPS)))
    table = page[page.index("## One loop") :].splitlines()
    assert table[2:] == [
        "Forward, 9 steps. Flags: default.",
        "",
        "| program | x first row | ms | us a step | temporary MiB | compile s | note |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| loopax | 1.00 | 2 | 100 | 0.50 | 0.25 |  |",
        "| Equinox | 4.00 | 8 |  | 0.50 | 0.25 |  |",
        "| lax |  |  |  | 0.50 | 0.25 | A \\| B |",
    ]
    assert "What flags change" not in page
    headers, _ = device_page.columns(record("One loop", DEFAULT, LOOPS[1]))  # of which nothing stands in some
    assert headers == ["program", "x first row", "ms", "temporary MiB", "compile s"]


@pytest.mark.parametrize("change", [{}, {"driver": "571"}, {"versions": {"jax": "9"}}])
def test_records_of_the_same_device_and_versions_are_kept(tmp_path, change):
    path, measured = tmp_path / "results.json", record("One loop", DEFAULT, *LOOPS)
    device_page.write(report(measured), path, "page")
    new = device_page.continued(device_page.empty(GPU._replace(**change), "device"), path)
    assert new["records"] == ([] if change else [measured])
    assert path.with_suffix(".md").read_text() == "page"
    assert json.loads(path.read_text())["device"] == GPU._asdict()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results.json", "results.md"]


RECORD = {"title": "One loop", "about": "forward, 9 steps", "rows": LOOPS}
PRINT = f"import json; print('noise'); print(json.dumps({RECORD!r}))"


def job(title="One loop", program=PRINT, flags=DEFAULT):
    return Job(title, flags, 20, ("-c", program))


def test_a_job_that_fails_or_hangs_says_how_it_ended(monkeypatch):
    with pytest.raises(JobFailedError, match=r"exit code 1: .*MemoryError: 80 GiB"):
        device_jobs.measured(job(program="raise MemoryError('80 GiB')"), "cpu")
    with pytest.raises(JobFailedError, match="exit code -6"):
        device_jobs.measured(job(program="import os; os.abort()"), "cpu")
    monkeypatch.setattr(device_jobs, "MOST_SECONDS", 0.2)
    with pytest.raises(JobFailedError, match=r"longer than 0\.2 s"):
        device_jobs.measured(job(program="import time; time.sleep(60)"), "cpu")


def test_what_fails_is_reported_and_the_others_are_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(device, "look", lambda _: CPU)
    monkeypatch.setattr(device_jobs, "jobs", lambda *_: [job("Broken", "raise MemoryError('80 GiB')"), job()])
    assert main(["--device", "cpu", "--to", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "results-a-processor.json").read_text())
    assert [record["title"] for record in report["records"]] == ["One loop"]
    assert [(failure["title"], "80 GiB" in failure["why"]) for failure in report["failed"]] == [("Broken", True)]
    shown = capsys.readouterr().out
    assert "Failed, and left out: exit code 1" in shown
    assert "[2/2] One loop, flags: default." in shown


def test_one_table_in_processes_of_its_own(tmp_path):
    """All that is between the command and the files, with tiny sizes."""
    command = [sys.executable, "-m", "benchmarks", "--device", "cpu", "--quick", "--to", str(tmp_path)]
    command += ["--only", "Condition every k steps: two flops, a"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = tmp_path.glob("results-*-quick.md")
    report = json.loads(page.with_suffix(".json").read_text())
    titles = [record["title"] for record in report["records"]]
    assert titles == [table.title for table in TABLES if "every k steps: two flops, a" in table.title]
    assert all(row["note"] == "" for record in report["records"] for row in record["rows"])
    assert all(f"## {title}" in page.read_text() for title in titles)


# ---- the tables: with tiny sizes all programs run, and compute the same


OF_BENCH = [table for table in TABLES if table.build in programs.programs()]  # tested in test_short.py
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
