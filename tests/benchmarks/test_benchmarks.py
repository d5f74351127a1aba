"""What the benchmark says of two reports, how reports are put together, the page, and programs as text."""

import io
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import loopax as lx
from benchmarks import __main__ as command
from benchmarks import compare, figures, page, records
from benchmarks.groups import Counts
from benchmarks.hlo import normalised
from benchmarks.run import run

FOLDER = Path(command.__file__).parent
COMMITTED = records.newest(FOLDER)[0]


def report():
    """Two programs with targets for time and memory, a table and a count."""
    programs = [
        {"name": "loopax Checkpointed()", "milliseconds": 8.0, "temporary_mib": 0.5, "compile_seconds": 0.4},
        {"name": "Equinox checkpointed", "milliseconds": 10.0, "temporary_mib": 1.0, "compile_seconds": 0.8},
    ]
    attributes = {
        "milliseconds": ("time", 0.9, 0.8),
        "temporary_mib": ("temporary memory", 1.0, 0.5),
        "compile_seconds": ("trace and compile", 0.4, 0.5),
    }
    about = {"of": "loopax Checkpointed()", "to": "Equinox checkpointed"}
    targets = [
        about | {"quantity": quantity, "bound": bound, "attribute": attribute, "measured": measured}
        for attribute, (quantity, bound, measured) in attributes.items()
    ]
    rows = [{"matrix": "Wishart", "evaluations": 3.0, "s": 1.0, "met": True}]
    return {
        "machine": "A",
        "versions": "jax 0.10.2, equinox 0.13.8, cpu, float32",
        "groups": [{"title": "Gradient", "programs": programs, "targets": targets}],
        "tables": [{"title": "Evaluations", "remark": "", "counts": ["evaluations"], "rows": rows}],
        "counts": [{"title": "Iterations", "values": {"lockstep": 100, "free": 50, "lockstep / free": 2.0}}],
    }


def test_targets_that_are_met_and_are_not():
    def after(target, **edit):
        new = report()
        new["groups"][0]["targets"][target].update(**edit)
        return [(c.title, c.before, c.now, c.verdict, c.fails) for c in compare.changes(report(), new)]

    assert after(0, measured=0.91) == [("Gradient", 0.8, 0.91, "was met, is not (bound 0.9)", True)]
    assert after(0, bound=0.7) == [("Gradient", 0.8, 0.8, "was met, is not (bound 0.7)", True)]
    assert after(2, measured=0.55) == []  # it was not met, and may stay so
    assert after(2, measured=0.9) == [("Gradient", 0.5, 0.9, "more", False)]
    assert after(2, measured=0.39) == [("Gradient", 0.5, 0.39, "is met now (bound 0.4)", False)]


@pytest.mark.parametrize(("measured", "code"), [(0.5, 0), (1.5, 1)])
def test_two_files_are_compared(tmp_path, monkeypatch, capsys, measured, code):
    new = report()
    new["groups"][0]["targets"][0]["measured"] = measured
    paths = {name: tmp_path / f"{name}.json" for name in ("old", "new")}
    for content, path in zip((report(), new), paths.values(), strict=True):
        records.write(content, path)
    arguments = ["benchmarks", "--against", str(paths["old"]), "--results", str(paths["new"])]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == code
    assert f"1 change beyond the tolerance, {code} for the worse" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_has(tmp_path):
    path, old = tmp_path / "results.json", report() | {"versions": "older, equinox 0.13.8, cpu, float32"}

    def interrupted():
        raise KeyboardInterrupt

    items = [Counts("Iterations", lambda: {"lockstep": 101}), Counts("Others", interrupted)]
    save = lambda new: records.write(records.with_part(old, new), path)
    with pytest.raises(KeyboardInterrupt):
        run(items, Console(file=io.StringIO()), {}, save)
    kept = records.read(path)
    assert kept["groups"] == old["groups"]
    assert kept["counts"][0]["values"] == {"lockstep": 101}
    assert "older" not in kept["counts"][0]["setting"]


def test_the_page_is_that_of_the_newest_results_and_the_ones_before():
    newest, older, *_ = map(records.read, records.newest(FOLDER))
    assert (FOLDER / "results.md").read_text() == page.page(newest, older)


def test_ratios_of_an_older_jax_stand_beside():
    older: records.Report = report() | {"versions": "jax 0.9.1, equinox 0.13.8, cpu, float32"}
    older["groups"][0]["targets"][1]["measured"] = 0.25
    older["counts"][0]["values"]["free"] = 51
    lines = page.page(report(), older).splitlines()
    assert "| target | bound | measured | met | JAX 0.9.1 |" in lines
    assert "| temporary memory: loopax Checkpointed() / Equinox checkpointed | 1 | 0.5 | yes | 0.25 |" in lines
    assert "| free | 50 | 51 |" in lines
    ratios = {"rows": [{"program": "scan", "ms": 1.0, "ratio": 0.5}, {"program": "new", "ms": 1.0, "ratio": 0.7}]}
    before = {"rows": [{"program": "scan", "ms": 2.0, "ratio": 0.25}]}
    shown = page.section({"title": "T"} | ratios, ("JAX 0.9.1", {"title": "T"} | before))
    assert "| scan | 1 | 0.5 | 0.25 |" in shown
    assert "| new | 1 | 0.7 |  |" in shown


def test_results_are_sorted_by_the_version_of_jax(tmp_path):
    paths = [records.of_jax(tmp_path, version) for version in ("0.9.2", "0.10.2", "0.12.0.1")]
    for path in paths:
        records.write(report(), path)
    assert records.newest(tmp_path) == paths[::-1]


def test_titles_are_of_one_table_each():
    committed = records.read(COMMITTED)
    titles = [title for kind in records.KINDS for title in records.by_title(committed, kind)]
    assert len(titles) == len(set(titles)) == sum(len(committed[kind]) for kind in records.KINDS)


def test_figures_are_drawn_of_what_there_is(tmp_path):
    committed = records.read(COMMITTED)
    lorenz = [record for record in committed["groups"] if "Lorenz, RK4" in record["title"]]
    drawn = figures.draw(committed | {"groups": lorenz, "tables": [], "counts": []}, tmp_path)
    names = ["benchmark-auto.svg", "benchmark-budgets.svg", "benchmark-gradients.svg"]
    assert sorted(path.name for path in drawn) == names
    assert sorted(tmp_path.iterdir()) == sorted(drawn)


ONE = """HloModule jit_f, entry_computation_layout={(f32[])->f32[]}

%add.1 (x.2: f32[], y.3: f32[]) -> f32[] {
  %x.2 = f32[] parameter(0)
  %y.3 = f32[] parameter(1)
  ROOT %sum = f32[] add(%x.2, %y.3)
}

ENTRY %main.9 (a.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0), metadata={op_name="a"}
  %two = f32[] constant(2)
  %sine = f32[] sine(%a.1)
  %print = () custom-call(%sine), custom_call_target="print", custom_call_has_side_effect=true
  %half = f32[] divide(%a.1, %two), metadata={op_name="b"}
  ROOT %out = f32[] call(%sine, %half), to_apply=%add.1
}
"""
LINES = ONE.split("\n")


def test_order_and_names_do_not_count():
    other = "\n".join(LINES[i] for i in [0, 1, *range(8, len(LINES)), *range(2, 8)])  # the entry first
    assert normalised(other) == normalised(ONE)
    other = ONE.replace("%sine", "%s").replace("%add.1", "%plus").replace('op_name="b"', 'op_name="c"')
    assert normalised(other) == normalised(ONE)
    sine, half = LINES[12] + "\n" + LINES[13] + "\n", LINES[14] + "\n"
    assert sine + half in ONE
    assert normalised(ONE.replace(sine + half, half + sine)) == normalised(ONE)


@pytest.mark.parametrize(
    "change",
    [("constant(2)", "constant(3)"), ("divide(%a.1, %two)", "divide(%two, %a.1)"), ("add(%x", "subtract(%x")],
    ids=str,
)
def test_what_is_computed_counts(change):
    assert normalised(ONE.replace(*change)) != normalised(ONE)


def test_a_seeded_change_of_one_constant_in_a_compiled_loop_is_seen():
    def text(constant):
        f = lambda x: lx.fori_loop(0, 5, lambda i, c: jnp.sin(c) * constant, x)
        return normalised(jax.jit(jax.grad(f)).lower(1.0).compile().as_text() or "")

    assert text(1.5) == text(1.5) != text(1.25)
