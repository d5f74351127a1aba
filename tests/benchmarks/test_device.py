"""`python -m benchmarks --device` and `--short`: flags, pages and files; every table is measured, or has failed."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import on_device, records
from benchmarks.short import beside_peers, device, device_jobs, device_page, device_worker, programs
from benchmarks.short.device import ALL, DEFAULT, Seen, environment
from benchmarks.short.device_jobs import Job, JobFailedError
from benchmarks.short.device_worker import TABLES
from benchmarks.short.measure import QUICK, Contender, Program, measure
from benchmarks.short.options import main
from tests.support.example_files import precision_of_a_user

CPU = Seen("cpu", "8 x cpu", "A Processor", "A Processor (2 logical cores)", "cpu", "", {"jax": "1", "jaxlib": "2"})
GPU = CPU._replace(platform="gpu", devices="2 x NVIDIA H100", kind="NVIDIA H100", runtime="cuda 12090", driver="570.1")


@pytest.mark.parametrize("value", ["+WHILE", "+BANANA"])
def test_xla_takes_these_flags_and_refuses_others(monkeypatch, value):
    """XLA reads flags for GPUs also where there is none."""
    assert "--xla_gpu_enable_command_buffer=+WHILE" in ALL[-1].xla
    variables = environment(ALL[-1], "cpu")
    variables["XLA_FLAGS"] = variables["XLA_FLAGS"].replace("+WHILE", value)
    command = [sys.executable, "-c", "import jax; jax.devices(); jax.jit(abs).lower(1.0).compile()"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (value == "+WHILE"), done.stderr[-500:]


ROW = {"library": "loopax", "milliseconds": 2.0, "ratio": 1.0, "temporary_mib": 0.5, "compile_seconds": 0.25}
RECORD = {"title": "One loop", "about": "forward, 9 steps", "rows": [ROW | {"steps_per_second": 1e4, "note": ""}]}


@pytest.mark.parametrize("change", [{}, {"driver": "571"}, {"versions": {"jax": "9"}}])
def test_records_of_the_same_device_and_versions_are_kept(tmp_path, change):
    path, measured = tmp_path / "results.json", RECORD | {"flags": DEFAULT.name, "seconds": 1.0}
    device_page.write(device_page.empty(GPU, "device") | {"records": [measured]}, path, "page")
    new = device_page.continued(device_page.empty(GPU._replace(**change), "device"), path)
    assert new["records"] == ([] if change else [measured])
    assert path.with_suffix(".md").read_text() == "page"
    assert json.loads(path.read_text())["device"] == GPU._asdict()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results.json", "results.md"]


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


@pytest.mark.slow
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


ROOT = Path(on_device.__file__).parents[1]


def test_tables_are_those_of_the_committed_results():
    committed = records.by_title(records.read(records.newest(ROOT / "benchmarks")[0]), "groups")
    titles = [title for _, _, title in on_device.TABLES]
    assert set(titles) <= set(committed)
    assert len(set(titles)) == len(titles)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _, _ in on_device.TABLES}))
def test_tables_stand_in_these_modules(name):
    with precision_of_a_user():
        groups = {group.title: group for group in importlib.import_module(f"benchmarks.{name}").groups()}
    for title in [title for module, _, title in on_device.TABLES if module == name]:
        first = groups[title].targets[0].of
        assert first in [case.name for case in groups[title].cases]


HAS_DIFFRAX = importlib.util.find_spec("diffrax") is not None  # not in all environments
NEW_RULES = any(getattr(jax.config, flag, False) for flag in ("jax_custom_jvp3", "jax_custom_vjp3"))
LIBRARIES = {
    "neural_ode": {"Equinox", "jax.lax, to the bound", "Flax NNX, to the bound", *(["Diffrax"] if HAS_DIFFRAX else [])},
    "ragged": {"Equinox", "jax.lax, to the bound", "Flax NNX, to the bound"},
    "uneven": {"Equinox", "jax.lax", "Flax NNX"},
    "small_body": {"Equinox", "jax.lax", "Flax NNX"},
}


LARGE = [programs.neural_ode]  # with solvers of several libraries


@pytest.mark.parametrize(
    "build",
    [pytest.param(build, marks=pytest.mark.slow) if build in LARGE else build for build in programs.programs()],
    ids=lambda f: f.__name__,
)
def test_all_libraries_compute_the_same(build):
    with precision_of_a_user():
        rows = measure(build(QUICK), rounds=1)
    assert {row.library for row in rows if not row.library.startswith("loopax")} == LIBRARIES[build.__name__]
    assert rows[0].library.startswith("loopax")
    assert rows[0].ratio == 1.0
    for row in rows:
        if row.library == "Equinox" and NEW_RULES and build is programs.ragged and row.note:
            # Some versions of JAX refuse Equinox's rule.
            assert "under vmap, the custom_vjp function" in row.note or "Non-hashable static arguments" in row.note
            continue
        assert row.note == "", row
        assert row.milliseconds is not None
        assert row.temporary_mib is not None
        assert (row.steps_per_second is not None) == (build.__name__ == "small_body")


def test_failures_and_other_results_are_rows_of_the_files(monkeypatch, tmp_path, capsys):
    def broken(x):
        raise ValueError("no such thing\nand more")

    functions = {"loopax": jnp.sin, "same": jnp.sin, "other": jnp.cos, "broken": broken, "shape": lambda x: x[:1]}
    contenders = [Contender(name, function) for name, function in functions.items()]
    program = Program("sines", contenders, (jnp.ones(3),), steps=3)
    monkeypatch.setattr(beside_peers, "programs", lambda: [lambda _: program])
    files = tmp_path / "figures.json", tmp_path / "figure.svg"
    assert main(["--short", "--json", str(files[0]), "--figure", str(files[1])]) == 0
    written = json.loads(files[0].read_text())
    assert written["versions"].keys() - {"diffrax"} == {"loopax", "jax", "jaxlib", "equinox", "flax"}
    assert written["machine"]
    notes = {row["library"]: row["note"] for row in written["measured"]}
    assert notes.pop("other").startswith("another result: 3.6e-01 away")
    of_others = {"shape": "another result", "broken": "ValueError: no such thing"}
    assert notes == {"loopax": "", "same": ""} | of_others
    assert "<svg" in files[1].read_text()
    lines = capsys.readouterr().out.splitlines()
    assert "sines" in lines
    assert any(line.split() == ["broken", "ValueError:", "no", "such", "thing"] for line in lines)
