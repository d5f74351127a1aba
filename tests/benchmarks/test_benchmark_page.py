"""The page of the benchmark counts what the committed tables say is met."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmark.md").read_text()
RESULTS = (ROOT / "benchmarks" / "results.md").read_text()

# The topics of the page, and how titles of their tables begin.
TOPICS = {
    "Gradients": ["Gradient:", "Gradient, static n", "Forward:"],
    "Budgets of checkpoints": ["Gradient with", "Second derivatives"],
    "Large arrays": ["Reads:", "Writes:"],
    "Other gradients": ["Replays:", "Storeless:", "Truncated:"],
    "Branches": ["Branches:"],
    "Lanes": [
        *("1024 lanes", "64 lanes", "128 lanes", "256 chains", "32 chains"),
        *("PLAID:", "Masks:", "Stages:", "NUTS of BlackJAX"),
    ],
    '`lanes="auto"`': ["Auto lanes:"],
    "`Auto`": ["Auto:"],
    "Models": ["NNX:"],
    "A solver": ["Adaptive solver:"],
    "Histories and buffers": ["Histories and buffers:"],
    "Traces": ["Traces:"],
    "Progress and durable loops": ["Progress:", "Durable loops:"],
    "Gradients of long runs": ["Gradients of long runs:"],
}


def rows() -> Iterator[tuple[str, dict[str, str]]]:
    """Of all tables that say what is met: the title of the table, and the cells by their columns."""
    title, columns = "", []
    for line in RESULTS.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("## "):
            title, columns = line.removeprefix("## "), []
        elif line.startswith("|") and not columns:
            columns = cells
        elif not line.startswith("|"):
            columns = []
        elif "met" in columns:
            row = dict(zip(columns, cells, strict=False))
            if row.get("met") in ("yes", "**no**"):
                yield title, row


def test_the_page_counts_all_bounds_that_are_met_and_missed() -> None:
    found = list(rows())
    shown, met, bounds = {}, 0, 0
    for topic, beginnings in TOPICS.items():
        mine = [row for title, row in found if title.startswith(tuple(beginnings))]
        yes = [row for row in mine if row["met"] == "yes"]
        shown[topic], met, bounds = f"{len(yes)} of {len(mine)}", met + len(yes), bounds + len(mine)
    assert bounds == len(found), "a table belongs to no topic, or to two"
    assert f"mark {bounds} bounds" in PAGE
    assert f"{met} are met" in PAGE
    for topic, count in shown.items():
        assert f"| [{topic}](" in PAGE
        assert re.findall(rf"\| \[{re.escape(topic)}\]\([^)]*\) \| ([^|]*) \|", PAGE)[0] == count, topic


def test_the_page_names_the_largest_miss_of_each_topic() -> None:
    """By how far it is beyond its bound."""
    for topic, beginnings in TOPICS.items():
        missed = [
            (float(row["measured"]) / float(row["bound"]), row)
            for title, row in rows()
            if title.startswith(tuple(beginnings)) and row["met"] != "yes" and {"measured", "bound"} <= row.keys()
        ]
        if missed and topic != "Traces":  # a coverage, which is to be large
            _, row = max(missed, key=lambda miss: miss[0])
            said = f"{float(row['measured']):.3g}, bound {float(row['bound']):.4g}"
            assert re.search(rf"\| \[{re.escape(topic)}\].*\| {re.escape(said)}", PAGE), (topic, said)


def test_the_three_numbers_are_those_of_the_committed_tables() -> None:
    """Of the overview, in one unit and with one decimal."""
    measured = [
        ("1024 lanes, log-normal counts: gradient", "loopax compact, fori_loop / Equinox checkpointed under vmap"),
        ("Gradient with 10 and 20 checkpoints: MLP", "loopax, 10 / Equinox, 10"),
        ("Adaptive solver: gradient, lanes = 64", "loopax Checkpointed(64) / Diffrax"),
    ]
    expected = [
        f"{1 / float(row['measured']):.1f}"
        for beginning, target in measured
        for title, row in rows()
        if title.startswith(beginning) and row["target"] == f"time: {target}"
    ]
    overview = (ROOT / "docs" / "index.md").read_text().partition("## Three numbers")[2]
    assert re.findall(r"^\| gradient .*? \| ([\d.]+) \|", overview, re.MULTILINE) == expected
    assert set(expected) <= set(re.findall(r"\d+\.\d", PAGE))
