"""What the benchmark says of two reports, how reports are put together, and the page: no measuring."""

import copy
import io
import json
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


def test_nothing_changed():
    assert changed(lambda _: None) == []


def test_milliseconds_and_seconds_are_of_a_machine():
    def edit(new):
        for program in new["groups"][0]["programs"]:
            program["milliseconds"] *= 10
            program["compile_seconds"] *= 10
        for row in new["tables"][0]["rows"]:
            row["s"] = 7.0
        new["machine"] = "B"

    assert changed(edit) == []


@pytest.mark.parametrize(("measured", "is_listed"), [(0.8 * 1.24, True), (0.89, False), (0.65, False), (0.6, True)])
def test_ratios_of_times_are_listed_beyond_the_tolerance_or_the_bound(measured, is_listed):
    found = changed(of_group(lambda group: group["targets"][0].update(measured=measured)))
    assert [c.what for c in found] == ["time: loopax Checkpointed() / Equinox checkpointed"] * is_listed


def test_a_target_that_is_not_met_any_more_fails():
    (found,) = changed(of_group(lambda group: group["targets"][0].update(measured=0.91)))
    assert (found.title, found.before, found.now, found.fails) == ("Gradient", 0.8, 0.91, True)
    assert found.verdict == "was met, is not (bound 0.9)"


def test_a_target_that_was_not_met_may_stay_so():
    assert changed(of_group(lambda group: group["targets"][2].update(measured=0.55))) == []
    (found,) = changed(of_group(lambda group: group["targets"][2].update(measured=0.9)))
    assert (found.verdict, found.fails) == ("more", False)


def test_a_target_that_is_met_now():
    (found,) = changed(of_group(lambda group: group["targets"][2].update(measured=0.39)))
    assert (found.verdict, found.fails) == ("is met now (bound 0.4)", False)


def test_a_bound_that_was_drawn_tighter_fails():
    (found,) = changed(of_group(lambda group: group["targets"][0].update(bound=0.7)))
    assert found.fails


def test_the_best_of_several_peers_is_one_target():
    old = report()
    old["groups"][0]["targets"][0]["to"] = ("Bounded()", "Residuals()")
    new = json.loads(json.dumps(old))  # which makes lists of tuples
    new["groups"][0]["targets"][0]["measured"] = 0.95
    (found,) = compare.changes(old, new)
    assert found.what == "time: loopax Checkpointed() / the best of Bounded(), Residuals()"


# ---- memory and counts


@pytest.mark.parametrize(
    ("mib", "verdict", "fails"), [(0.52, "more", True), (0.48, "less", False), (0.504, None, None)]
)
def test_memory(mib, verdict, fails):
    found = changed(of_group(lambda group: group["programs"][0].update(temporary_mib=mib)))
    assert [(c.verdict, c.fails) for c in found] == ([(verdict, fails)] if verdict else [])


def test_the_memory_of_a_peer_does_not_fail():
    (found,) = changed(of_group(lambda group: group["programs"][1].update(temporary_mib=2.0)))
    assert (found.verdict, found.fails) == ("more, of a peer", False)


def test_memory_is_not_compared_with_that_of_another_kind_of_device():
    def edit(new):
        new["versions"] = "jax 0.10.2, equinox 0.13.8, gpu, float32"
        new["groups"][0]["programs"][0]["temporary_mib"] = 5.0
        new["groups"][0]["targets"][1]["measured"] = 5.0
        new["tables"][0] |= {"counts": [], "memory": ["evaluations"]}
        new["tables"][0]["rows"][0]["evaluations"] = 9.0

    assert changed(edit) == []


def test_a_record_of_another_machine_is_of_its_device():
    old = report()
    old["versions"] = "jax 0.10.2, equinox 0.13.8, gpu, float32"
    old["groups"][0]["setting"] = f"A. {report()['versions']}"
    new = report()
    new["groups"][0]["programs"][0]["temporary_mib"] = 5.0
    assert [c.fails for c in compare.changes(old, new)] == [True]


def test_counts_in_tables_are_found_by_the_words_of_their_row():
    def edit(new):
        rows = new["tables"][0]["rows"]
        rows[1]["evaluations"] = 4.2
        rows[2]["evaluations"] = 4.5
        rows.insert(0, {"matrix": "new", "evaluations": 9.0, "s": 1.0, "met": False})

    found = changed(edit)
    assert [(c.what, c.verdict, c.fails) for c in found] == [
        ("Wishart (2): evaluations", "more", True),
        ("rank one: evaluations", "less", False),
    ]


def test_what_a_table_says_is_met():
    def edit(new):
        new["tables"][0]["rows"][0]["met"] = False
        new["tables"][0]["rows"][2]["met"] = True

    assert [(c.what, c.verdict, c.fails) for c in changed(edit)] == [
        ("Wishart: met", "was met, is not", True),
        ("rank one: met", "is met now", False),
    ]


def test_what_is_counted_once_but_not_the_ratios_that_follow():
    found = changed(lambda new: new["counts"][0]["values"].update({"free": 60, "lockstep / free": 100 / 60}))
    assert [(c.title, c.what, c.fails) for c in found] == [("Iterations", "free", True)]


def test_what_only_one_report_has_is_not_compared():
    def edit(new):
        new["groups"][0]["programs"].pop()
        new["groups"][0]["targets"].clear()
        new["tables"][0]["title"] = "Others"
        new["counts"].clear()

    new = report()
    edit(new)
    assert compare.changes(report(), new) == []
    assert compare.unmeasured(report(), new) == ["Evaluations", "Iterations"]


# ---- the command


@pytest.mark.parametrize(("measured", "code"), [(0.5, 0), (1.5, 1)])
def test_two_files_are_compared(tmp_path, monkeypatch, capsys, measured, code):
    new = report()
    new["groups"][0]["targets"][0]["measured"] = measured
    for name, content in {"old": report(), "new": new}.items():
        records.write(content, tmp_path / f"{name}.json")
    monkeypatch.setattr(
        "sys.argv", ["benchmarks", "--against", str(tmp_path / "old.json"), "--results", str(tmp_path / "new.json")]
    )
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == code
    output = capsys.readouterr().out
    assert f"1 change beyond the tolerance, {code} for the worse" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--results", "new.json"], "--results needs --against FILE"),
        (["--write"], "--write is for a part"),
        (["a part", "--figures"], "a part is measured"),
        (["--against", "--list"], "--against writes nothing"),
    ],
)
def test_arguments_that_do_not_go_together(monkeypatch, capsys, arguments, message):
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


def test_a_whole_run_replaces_all_but_what_failed():
    new = report() | {"machine": "B", "tables": []}
    new["groups"][0]["targets"] = []
    whole = records.with_whole(report(), new, ["Gradient", "Evaluations"])
    assert whole["machine"] == "B"
    assert whole["groups"] == new["groups"]
    assert whole["tables"][0]["setting"] == records.setting(report())
    assert whole["counts"] == []


def test_a_part_says_where_it_was_measured():
    new = report() | {"machine": "B", "tables": [], "counts": []}
    merged = records.with_part(report(), new)
    assert merged["machine"] == "A"
    assert merged["groups"][0]["setting"].startswith("B. ")
    assert "setting" not in merged["tables"][0]


def test_estimates_are_of_the_last_run_or_of_the_times_of_programs():
    old = report()
    old["counts"][0]["seconds"] = 12.5
    items = [Group("Gradient", [], [], rounds=2, compilations=3), Counts("Iterations", dict), Counts("New", dict)]
    assert estimates(items, old) == pytest.approx({"Gradient": 5 * 0.018 + 3 * 1.2, "Iterations": 12.5})


# ---- what is committed


def test_the_page_is_that_of_the_results():
    assert COMMITTED.with_suffix(".md").read_text() == page.page(records.read(COMMITTED))


def test_titles_are_of_one_table_each():
    committed = records.read(COMMITTED)
    titles = [title for kind in records.KINDS for title in records.by_title(committed, kind)]
    assert len(titles) == len(set(titles)) == sum(len(committed[kind]) for kind in records.KINDS)


def test_figures_are_drawn_of_what_there_is(tmp_path):
    committed = records.read(COMMITTED)
    lorenz = [record for record in committed["groups"] if "Lorenz, RK4" in record["title"]]
    some = committed | {"groups": lorenz, "tables": [], "counts": []}
    drawn = figures.draw(some, tmp_path)
    assert sorted(path.name for path in drawn) == [
        "benchmark-auto.svg",
        "benchmark-budgets.svg",
        "benchmark-gradients.svg",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(drawn)
