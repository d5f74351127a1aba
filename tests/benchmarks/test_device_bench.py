"""`python -m benchmarks --device`: every table is measured or said to have failed, and the files grow with them."""

import json
import subprocess
import sys

import pytest

from benchmarks.short import device, device_bench, device_jobs, device_worker, programs
from benchmarks.short.device import ALL, DEFAULT, LOOPS_AS_GRAPHS
from benchmarks.short.device_jobs import Job, JobFailedError
from benchmarks.short.device_worker import BY_TITLE, TABLES
from benchmarks.short.measure import BY_NAME, QUICK
from benchmarks.short.options import main
from tests.benchmarks.test_device import CPU, LOOPS
from tests.support.example_files import precision_of_a_user

RECORD = {"title": "One loop", "about": "forward, 9 steps", "rows": LOOPS}
PRINT = f"import json; print('noise'); print(json.dumps({RECORD!r}))"


def job(title="One loop", program=PRINT, flags=DEFAULT):
    return Job(title, flags, 20, ("-c", program))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run jobs, and return the exit code and what is written."""

    def of_jobs(*jobs, options=()):
        monkeypatch.setattr(device, "look", lambda _: CPU)
        monkeypatch.setattr(device_jobs, "jobs", lambda *_: list(jobs))
        code = main(["--device", "cpu", "--to", str(tmp_path), *options])
        file = tmp_path / "results-a-processor.json"
        return code, json.loads(file.read_text()) if file.exists() else None

    return of_jobs


# ---- what is run


def test_a_gpu_and_a_clone_have_more_tables(monkeypatch):
    """Twenty minutes at most; a clone has more tables, but no tiny sizes of them."""
    of_package = {platform: device_jobs.jobs(platform, "quick") for platform in ("cpu", "gpu")}
    assert [job.title for job in of_package["cpu"]] == [table.title for table in TABLES]
    assert {job.flags for job in of_package["gpu"]} == set(ALL)
    assert [job.flags for job in of_package["gpu"]][: len(TABLES)] == [DEFAULT] * len(TABLES)  # what matters most
    assert sum(job.seconds for job in device_jobs.jobs("gpu", "device")) <= 60 * device_bench.MINUTES
    assert len(device_jobs.jobs("cpu", "device")) > len(of_package["cpu"])
    monkeypatch.setattr(device_jobs, "clone", lambda: None)
    assert len(device_jobs.jobs("cpu", "device")) == len(of_package["cpu"])


def test_list_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr(device, "look", None)
    assert main(["--device", "gpu", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(table.title in shown for table in TABLES)
    assert "--xla_gpu_enable_command_buffer=+WHILE" in shown
    assert "minutes" in shown


# ---- one job


def test_a_job_has_its_flags_and_prints_its_record_last():
    assert device_jobs.measured(job(flags=LOOPS_AS_GRAPHS), "cpu") == RECORD | {"flags": "+WHILE"}
    program = "import json, os; print(json.dumps({'xla': os.environ['XLA_FLAGS'], 'jax': os.environ['JAX_PLATFORMS']}))"
    found = device_jobs.measured(job(program=program, flags=LOOPS_AS_GRAPHS), "cpu")
    assert found["xla"].endswith("--xla_gpu_enable_command_buffer=+WHILE")
    assert found["jax"] == "cpu"


def test_a_job_that_fails_or_hangs_says_how_it_ended(monkeypatch):
    with pytest.raises(JobFailedError, match=r"exit code 1: .*MemoryError: 80 GiB"):
        device_jobs.measured(job(program="raise MemoryError('80 GiB')"), "cpu")
    with pytest.raises(JobFailedError, match="exit code -6"):
        device_jobs.measured(job(program="import os; os.abort()"), "cpu")
    monkeypatch.setattr(device_jobs, "MOST_SECONDS", 0.2)
    with pytest.raises(JobFailedError, match=r"longer than 0\.2 s"):
        device_jobs.measured(job(program="import time; time.sleep(60)"), "cpu")


# ---- a run


def test_what_fails_is_reported_and_the_others_are_measured(run, capsys):
    code, report = run(job("Broken", "raise MemoryError('80 GiB')"), job())
    assert code == 1
    assert [record["title"] for record in report["records"]] == ["One loop"]
    assert [(failure["title"], "80 GiB" in failure["why"]) for failure in report["failed"]] == [("Broken", True)]
    shown = capsys.readouterr().out
    assert "Failed, and left out: exit code 1" in shown
    assert "[2/2] One loop, flags: default." in shown


def test_an_interrupted_run_keeps_what_it_has(run, monkeypatch, capsys):
    measured = device_jobs.measured

    def until_interrupted(job, platform):
        if job.title == "Interrupted":
            raise KeyboardInterrupt
        return measured(job, platform)

    monkeypatch.setattr(device_jobs, "measured", until_interrupted)
    code, report = run(job(), job("Interrupted"), job("Never begun"))
    assert code == 1
    assert [record["title"] for record in report["records"]] == ["One loop"]
    assert "What was measured is in" in capsys.readouterr().err


def test_what_there_is_no_time_for_is_said_and_stays_as_it_was_measured_before(run, capsys):
    code, report = run(job(), options=["--minutes", "1e-9"])
    assert code == 0
    assert [failure["why"] for failure in report["failed"]] == ["not begun after 1e-09 minutes"]
    assert "Not measured, of 1:\n  One loop, flags: default" in capsys.readouterr().out
    run(job())
    _, report = run(job(), job("New"), options=["--minutes", "1e-9"])
    assert [record["title"] for record in report["records"]] == ["One loop"]
    assert [failure["title"] for failure in report["failed"]] == ["New"]


def test_options_that_do_not_go_together(capsys):
    for options, message in (
        (["--list"], "--list needs --device"),
        (["--only", "loop"], "--only needs --device"),
        (["--device", "cpu", "--quick", "--only", "banana"], "No table has 'banana'"),
        (["--device", "cpu", "--json", "x.json"], "--json does not go with --device"),
        (["--device", "cpu", "--to", "/no/such/folder"], "there is no folder /no/such/folder"),
    ):
        assert main(options) == 2
        assert message in capsys.readouterr().err


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


def test_sizes_have_names_and_a_device_takes_few_steps():
    assert len(BY_TITLE) == len(TABLES)
    assert set(BY_NAME) == {"device", "quick"}
    # 50 microseconds a step, and three times as many evaluations in a gradient: less than a second
    assert 3 * 50e-6 * max(BY_NAME["device"].loop_steps, BY_NAME["device"].gradient_steps) < 1
