"""Which device JAX takes, under which flags of XLA, and the page and the file of what was measured on it."""

import json
import subprocess
import sys

import pytest

from benchmarks.short import device, device_page
from benchmarks.short.device import ALL, DEFAULT, LOOPS_AS_GRAPHS, Seen, environment, flags_of_user
from benchmarks.short.options import main

CPU = Seen("cpu", "8 x cpu", "A Processor", "A Processor (2 logical cores)", "cpu", "", {"jax": "1", "jaxlib": "2"})
GPU = CPU._replace(platform="gpu", devices="2 x NVIDIA H100", kind="NVIDIA H100", runtime="cuda 12090", driver="570.1")


def test_what_a_process_sees():
    seen = device.look("cpu")
    assert (seen.platform, seen.devices, seen.says) == ("cpu", "8 x cpu", "")  # as many as these tests ask for
    assert seen.processor.startswith(seen.kind)
    assert {"loopax", "jax", "jaxlib", "equinox"} <= set(seen.versions)


def test_a_process_that_finds_no_device_says_why(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "banana")
    seen = device.look("gpu")
    assert seen.platform == ""
    assert "banana" in seen.says
    assert "JAX sees: no device" in device.problem("gpu", seen)


def test_without_a_gpu_it_says_what_is_there_and_what_to_do(monkeypatch):
    assert device.problem("gpu", GPU) == device.problem("cpu", CPU) == ""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(device, "_nvidia_smi", lambda _: "NVIDIA H100, 570.1")
    said = device.problem("gpu", CPU)
    there = ["JAX sees: 8 x cpu (platform cpu)", "versions: jax 1, jaxlib 2", "nvidia-smi: NVIDIA H100, 570.1"]
    to_do = ['pip install "jax[cuda13]"', '"jax[cuda12]"', "python -m benchmarks --device cpu"]
    for words in ("platform 'gpu', which was asked for", *there, "JAX_PLATFORMS: cpu", *to_do):
        assert words in said


def test_the_command_ends_with_2_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(device, "look", lambda _: CPU)
    assert main(["--device", "gpu", "--to", str(tmp_path)]) == 2
    assert "JAX sees: 8 x cpu" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- flags


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


# ---- the page


def row(library, milliseconds, ratio, **others):
    values = {"temporary_mib": 0.5, "compile_seconds": 0.25, "steps_per_second": None, "note": ""}
    return {"library": library, "milliseconds": milliseconds, "ratio": ratio} | values | others


def record(title, flags, *rows):
    return {"title": title, "flags": flags.name, "about": "forward, 9 steps", "rows": list(rows), "seconds": 1.0}


LOOPS = [row("loopax", 2.0, 1.0, steps_per_second=1e4), row("Equinox", 8.0, 4.0), row("lax", None, None, note="A | B")]


def report(*records, failed=()):
    return device_page.empty(GPU, "device") | {"records": list(records), "failed": list(failed)}


def test_the_page_says_on_what_it_was_measured():
    lines = device_page.page(report()).splitlines()
    assert lines[0] == "# NVIDIA H100"
    assert "Written by `python -m benchmarks --device gpu`." in lines
    assert "| device | 2 x NVIDIA H100; A Processor (2 logical cores) |" in lines
    assert "| driver | 570.1 |" in lines
    assert "| runtime | cuda 12090 |" in lines
    (flags,) = [line for line in lines if line.startswith("| flags of XLA")]
    assert all(flag in flags for flags_ in ALL for flag in flags_.xla)


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


def test_flags_are_compared_program_by_program():
    graphs = record("One loop", LOOPS_AS_GRAPHS, row("loopax", 1.0, 1.0), row("new", 1.0, 1.0))
    page = device_page.page(report(record("One loop", DEFAULT, *LOOPS), graphs, record("Other", DEFAULT, *LOOPS)))
    table = page[page.index("## What flags change") : page.index("## One loop")].splitlines()
    assert [line for line in table if line.startswith("|")] == [
        "| program | +WHILE | table |",
        "| --- | --- | --- |",
        "| loopax | 0.50 | One loop |",
        "| Equinox |  | One loop |",
    ]


def test_what_was_not_measured_is_said():
    failed = [{"title": "One loop", "flags": "+WHILE", "why": "it took longer than 240 s"}]
    page = device_page.page(report(failed=failed))
    assert "| One loop | it took longer than 240 s | +WHILE |" in page[page.index("## Not measured") :]
    tiny = device_page.page(device_page.empty(GPU, "quick"))
    assert tiny.splitlines()[0] == "# NVIDIA H100, tiny sizes: these are no measurements"


# ---- the file


FAILURE = {"title": "One loop", "flags": "default", "why": "memory"}


def test_files_are_named_after_the_device():
    for kind, sizes, name in (
        ("NVIDIA H100 80GB HBM3", "device", "results-nvidia-h100-80gb-hbm3"),
        ("Intel(R) Xeon(R) Processor", "device", "results-intel-r-xeon-r-processor"),
        ("NVIDIA A100-SXM4-40GB", "quick", "results-nvidia-a100-sxm4-40gb-quick"),
    ):
        assert device_page.stem(GPU._replace(kind=kind), sizes) == name
    assert list(device_page.empty(CPU, "device")["flags"]) == ["default"]  # a CPU has no flags of GPUs


def test_a_record_replaces_the_older_one_in_its_place():
    first, second, new = (record(title, DEFAULT, *LOOPS[:n]) for title, n in [("A", 1), ("B", 1), ("A", 2)])
    found = device_page.with_record(report(first, second), new)
    assert found["records"] == [new, second]
    assert device_page.has(found, "B", "default")
    assert not device_page.has(found, "B", "+WHILE")


def test_a_table_is_measured_or_has_failed():
    measured = record("One loop", DEFAULT, *LOOPS)
    failed = device_page.with_failure(report(measured), FAILURE)
    assert (failed["records"], failed["failed"]) == ([], [FAILURE])
    assert device_page.with_failure(failed, FAILURE)["failed"] == [FAILURE]
    again = device_page.with_record(failed, measured)
    assert (again["records"], again["failed"]) == ([measured], [])


@pytest.mark.parametrize("change", [{}, {"driver": "571"}, {"versions": {"jax": "9"}}])
def test_records_of_the_same_device_and_versions_are_kept(tmp_path, change):
    path, measured = tmp_path / "results.json", record("One loop", DEFAULT, *LOOPS)
    device_page.write(report(measured), path, "page")
    new = device_page.continued(device_page.empty(GPU._replace(**change), "device"), path)
    assert new["records"] == ([] if change else [measured])
    assert path.with_suffix(".md").read_text() == "page"
    assert json.loads(path.read_text())["device"] == GPU._asdict()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results.json", "results.md"]
