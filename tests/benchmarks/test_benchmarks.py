"""What the benchmark says of two reports, how reports are put together, and the page: no measuring."""

import copy
import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import compare, figures, page, records
from benchmarks.groups import Counts, Group
from benchmarks.run import estimates, run

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


def of_group(edit):
    return lambda new: edit(new["groups"][0])


# ---- targets


def test_milliseconds_and_seconds_are_of_a_machine():
    def edit(new):
        for program in new["groups"][0]["programs"]:
            program["milliseconds"] *= 10
            program["compile_seconds"] *= 10
        for row in new["tables"][0]["rows"]:
            row["s"] = 7.0
        new["machine"] = "B"

    assert changed(edit) == changed(lambda _: None) == []


def test_ratios_of_times_are_listed_beyond_the_tolerance_or_the_bound():
    for measured, is_listed in ((0.8 * 1.24, True), (0.89, False), (0.65, False), (0.6, True)):
        found = changed(of_group(lambda group, m=measured: group["targets"][0].update(measured=m)))
        assert [c.what for c in found] == ["time: loopax Checkpointed() / Equinox checkpointed"] * is_listed


def test_targets_that_are_met_and_are_not():
    def after(target, **edit):
        found = changed(of_group(lambda group: group["targets"][target].update(**edit)))
        return [(c.title, c.before, c.now, c.verdict, c.fails) for c in found]

    assert after(0, measured=0.91) == [("Gradient", 0.8, 0.91, "was met, is not (bound 0.9)", True)]
    assert after(0, bound=0.7) == [("Gradient", 0.8, 0.8, "was met, is not (bound 0.7)", True)]
    assert after(2, measured=0.55) == []  # it was not met, and may stay so
    assert after(2, measured=0.9) == [("Gradient", 0.5, 0.9, "more", False)]
    assert after(2, measured=0.39) == [("Gradient", 0.5, 0.39, "is met now (bound 0.4)", False)]


# ---- memory and counts


def test_memory():
    def after(program, mib):
        found = changed(of_group(lambda group: group["programs"][program].update(temporary_mib=mib)))
        return [(c.verdict, c.fails) for c in found]

    assert [after(0, mib) for mib in (0.52, 0.48, 0.504)] == [[("more", True)], [("less", False)], []]
    assert after(1, 2.0) == [("more, of a peer", False)]


def test_memory_is_not_compared_with_that_of_another_kind_of_device():
    def edit(new):
        new["versions"] = "jax 0.10.2, equinox 0.13.8, gpu, float32"
        new["groups"][0]["programs"][0]["temporary_mib"] = 5.0
        new["groups"][0]["targets"][1]["measured"] = 5.0
        new["tables"][0] |= {"counts": [], "memory": ["evaluations"]}
        new["tables"][0]["rows"][0]["evaluations"] = 9.0

    assert changed(edit) == []


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


def test_what_is_counted_once_but_not_the_ratios_that_follow():
    found = changed(lambda new: new["counts"][0]["values"].update({"free": 60, "lockstep / free": 100 / 60}))
    assert [(c.title, c.what, c.fails) for c in found] == [("Iterations", "free", True)]


def test_what_only_one_report_has_is_not_compared():
    new = report() | {"counts": []}
    new["groups"][0]["programs"].pop()
    new["groups"][0]["targets"].clear()
    new["tables"][0]["title"] = "Others"
    assert compare.changes(report(), new) == []
    assert compare.unmeasured(report(), new) == ["Evaluations", "Iterations"]


# ---- the command


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


def test_arguments_that_do_not_go_together(monkeypatch, capsys):
    for arguments, message in (
        (["--results", "new.json"], "--results needs --against FILE"),
        (["--write"], "--write is for a part"),
        (["a part", "--figures"], "a part is measured"),
        (["--against", "--list"], "--against writes nothing"),
    ):
        monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
        with pytest.raises(SystemExit):
            command.main()
        assert message in capsys.readouterr().err


# ---- a run


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


def test_what_fails_is_said_and_left_out():
    def failing():
        raise RuntimeError("out of memory")

    output = io.StringIO()
    console = Console(file=output, width=200)
    items = [Counts("Failing", failing), Counts("Iterations", lambda: {"lockstep": 101})]
    new, failed = run(items, console, {"Failing": 100.0}, lambda _: None)
    assert failed == ["Failing"]
    assert [record["title"] for record in new["counts"]] == ["Iterations"]
    assert "[1/2] Failing: about 2 min; from here on about 2 min, and 1 without an estimate" in output.getvalue()
    assert "RuntimeError: out of memory" in output.getvalue()


def test_a_whole_run_replaces_all_but_what_failed_and_a_part_itself():
    new = report() | {"machine": "B", "tables": []}
    new["groups"][0]["targets"] = []
    whole = records.with_whole(report(), new, ["Gradient", "Evaluations"])
    assert (whole["machine"], whole["groups"], whole["counts"]) == ("B", new["groups"], [])
    assert whole["tables"][0]["setting"] == records.setting(report())
    merged = records.with_part(report(), new | {"counts": []})
    assert merged["machine"] == "A"
    assert merged["groups"][0]["setting"].startswith("B. ")
    assert "setting" not in merged["tables"][0]


def test_estimates_are_of_the_last_run_or_of_the_times_of_programs():
    old = report()
    old["counts"][0]["seconds"] = 12.5
    items = [Group("Gradient", [], [], rounds=2, compilations=3), Counts("Iterations", dict), Counts("New", dict)]
    assert estimates(items, old) == pytest.approx({"Gradient": 5 * 0.018 + 3 * 1.2, "Iterations": 12.5})


# ---- what is committed


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
