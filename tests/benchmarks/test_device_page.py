"""The page of a device: what decides stands second, other flags are compared, and what is missing is said."""

from benchmarks.short import device_page
from benchmarks.short import device_page as device_report
from benchmarks.short.device import ALL, DEFAULT, LOOPS_AS_GRAPHS
from tests.benchmarks.test_device import GPU


def row(library, milliseconds, ratio, **others):
    values = {"temporary_mib": 0.5, "compile_seconds": 0.25, "steps_per_second": None, "note": ""}
    return {"library": library, "milliseconds": milliseconds, "ratio": ratio} | values | others


def record(title, flags, *rows):
    return {"title": title, "flags": flags.name, "about": "forward, 9 steps", "rows": list(rows), "seconds": 1.0}


LOOPS = [row("loopax", 2.0, 1.0, steps_per_second=1e4), row("Equinox", 8.0, 4.0), row("lax", None, None, note="A | B")]


def report(*records, failed=()):
    return device_report.empty(GPU, "device") | {"records": list(records), "failed": list(failed)}


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


def test_columns_in_which_nothing_stands_are_left_out():
    headers, _ = device_page.columns(record("One loop", DEFAULT, LOOPS[1]))
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


def test_without_other_flags_nothing_is_compared():
    assert "What flags change" not in device_page.page(report(record("One loop", DEFAULT, *LOOPS)))


def test_what_was_not_measured_is_said():
    failed = [{"title": "One loop", "flags": "+WHILE", "why": "it took longer than 240 s"}]
    page = device_page.page(report(failed=failed))
    assert "| One loop | it took longer than 240 s | +WHILE |" in page[page.index("## Not measured") :]


def test_tiny_sizes_are_no_measurements():
    tiny = device_page.page(device_report.empty(GPU, "quick"))
    assert tiny.splitlines()[0] == "# NVIDIA H100, tiny sizes: these are no measurements"
