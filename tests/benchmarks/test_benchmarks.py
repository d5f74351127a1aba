"""What the benchmark says of two reports, how reports are put together, and the page: no measuring."""

import copy
import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import compare, figures, page, records
from benchmarks.groups import Counts
from benchmarks.run import run

COMMITTED = Path(command.__file__).parent / "results.json"


def report():
    """Two programs with targets for time and memory, a table and a count."""
    programs = [
        {"name": "loopax Checkpointed()", "milliseconds": 8.0, "temporary_mib": 0.5, "compile_seconds": 0.4},
        {"name": "Equinox checkpointed", "milliseconds": 10.0, "temporary_mib": 1.0, "compile_seconds": 0.8},
    ]
    targets = [target("milliseconds", 0.9, 0.8), target("temporary_mib", 1.0, 0.5), target("compile_seconds", 0.4, 0.5)]
    rows = [
        {"matrix": "Wishart", "evaluations": 3.0, "s": 1.0, "met": True},
        {"matrix": "Wishart", "evaluations": 4.0, "s": 1.0, "met": None},
        {"matrix": "rank one", "evaluations": 5.0, "s": 1.0, "met": False},
    ]
    return {
        "machine": "A",
        "versions": "jax 0.10.2, equinox 0.13.8, cpu, float32",
        "groups": [{"title": "Gradient", "programs": programs, "targets": targets}],
        "tables": [{"title": "Evaluations", "remark": "", "counts": ["evaluations"], "rows": rows}],
        "counts": [{"title": "Iterations", "values": {"lockstep": 100, "free": 50, "lockstep / free": 2.0}}],
    }


def target(attribute, bound, measured):
    names = {"milliseconds": "time", "temporary_mib": "temporary memory", "compile_seconds": "trace and compile"}
    about = {"quantity": names[attribute], "of": "loopax Checkpointed()", "to": "Equinox checkpointed"}
    return about | {"bound": bound, "attribute": attribute, "measured": measured}


def changed(edit):
    """What is said of a report after an edit."""
    new = copy.deepcopy(report())
    edit(new)
    return compare.changes(report(), new)


def test_targets_that_are_met_and_are_not():
    def after(target, **edit):
        found = changed(lambda new: new["groups"][0]["targets"][target].update(**edit))
        return [(c.title, c.before, c.now, c.verdict, c.fails) for c in found]

    assert after(0, measured=0.91) == [("Gradient", 0.8, 0.91, "was met, is not (bound 0.9)", True)]
    assert after(0, bound=0.7) == [("Gradient", 0.8, 0.8, "was met, is not (bound 0.7)", True)]
    assert after(2, measured=0.55) == []  # it was not met, and may stay so
    assert after(2, measured=0.9) == [("Gradient", 0.5, 0.9, "more", False)]
    assert after(2, measured=0.39) == [("Gradient", 0.5, 0.39, "is met now (bound 0.4)", False)]


def test_memory():
    def after(program, mib):
        found = changed(lambda new: new["groups"][0]["programs"][program].update(temporary_mib=mib))
        return [(c.verdict, c.fails) for c in found]

    assert [after(0, mib) for mib in (0.52, 0.48, 0.504)] == [[("more", True)], [("less", False)], []]
    assert after(1, 2.0) == [("more, of a peer", False)]


def test_counts_in_tables_are_found_by_the_words_of_their_row():
    def edit(new):
        rows = new["tables"][0]["rows"]
        rows[0]["met"] = False
        rows[1]["evaluations"] = 4.2
        rows[2] |= {"evaluations": 4.5, "met": True}
        rows.insert(0, {"matrix": "new", "evaluations": 9.0, "s": 1.0, "met": False})

    assert {(c.what, c.verdict, c.fails) for c in changed(edit)} == {
        ("Wishart: met", "was met, is not", True),
        ("Wishart (2): evaluations", "more", True),
        ("rank one: evaluations", "less", False),
        ("rank one: met", "is met now", False),
    }


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


def test_the_page_is_that_of_the_results_whose_titles_are_of_one_table_each():
    committed = records.read(COMMITTED)
    assert COMMITTED.with_suffix(".md").read_text() == page.page(committed)
    titles = [title for kind in records.KINDS for title in records.by_title(committed, kind)]
    assert len(titles) == len(set(titles)) == sum(len(committed[kind]) for kind in records.KINDS)


def test_figures_are_drawn_of_what_there_is(tmp_path):
    committed = records.read(COMMITTED)
    lorenz = [record for record in committed["groups"] if "Lorenz, RK4" in record["title"]]
    drawn = figures.draw(committed | {"groups": lorenz, "tables": [], "counts": []}, tmp_path)
    names = ["benchmark-auto.svg", "benchmark-budgets.svg", "benchmark-gradients.svg"]
    assert sorted(path.name for path in drawn) == names
    assert sorted(tmp_path.iterdir()) == sorted(drawn)
