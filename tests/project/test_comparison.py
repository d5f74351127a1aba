"""The page that compares loopax with its peers says what small programs do: each cell of its tables has one."""

import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.extras import is_installed
from tests.project import comparison_programs as programs
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "comparison.md"

# The first words of rows, and the packages that they are about.
PACKAGES = {
    "jax.lax": "jax",
    "Flax": "flax",
    "Equinox": "equinox",
    "brainstate": "brainstate",
    "Diffrax": "diffrax",
    "optimistix": "optimistix",
}

# The programs of the page's tables: by heading and column.

EVIDENCE: dict[str, dict[str, Callable[[str], str]]] = {
    "Gradient of a while loop": {
        "no bound": partial(programs.derivative, "reverse", bound=None),
        "bound": partial(programs.derivative, "reverse"),
        "forward": partial(programs.derivative, "forward"),
    },
    "Second derivatives": {mode: partial(programs.derivative, mode) for mode in ("rev/rev", "fwd/rev", "rev/fwd")},
    "Memory of a gradient": {"choice": programs.choice, "fewer": programs.fewer},
    "A length known at run time": {
        "values": programs.values_of_length,
        "gradient": programs.gradient_of_length,
        "lanes": programs.lanes_of_length,
    },
    "A batch of loops": {"no NaN": programs.no_nan, "inner": programs.inner, "leave": programs.leave},
    "A bound that is too low": {"error": programs.error_at_bound, "flag": programs.flag_at_bound},
    "Models in the carry": {"Equinox": programs.equinox_model, "NNX": programs.nnx_model, "states": programs.state},
    "Weights in the carry": {"stored once": programs.stored_once, "shared": programs.shared},
    "Lanes over devices": {
        "values": partial(programs.over_devices, lambda f: f),
        "gradient": partial(programs.over_devices, jax.grad),
    },
    "Differential equations": {mode: partial(programs.of_decay, mode) for mode in ("reverse", "forward", "rev/rev")},
    "Fixed points": {mode: partial(programs.of_fixed_point, mode) for mode in ("reverse", "forward", "rev/rev")},
}


class Cell(NamedTuple):
    """A word of a table."""

    heading: str
    row: str
    column: str
    word: str

    def __str__(self) -> str:
        return f"{self.heading}: {self.row}, {self.column}"


def tables() -> dict[str, list[list[str]]]:
    """The lines of the page's tables, by their headings."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and not line.startswith("|---"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


TABLES = tables()
VERSIONS = dict(TABLES.pop("How to read the tables")[1:])
CELLS = [
    Cell(heading, row, column, word)
    for heading, ((_, *columns), *lines) in TABLES.items()
    for row, *words in lines
    for column, word in zip(columns, words, strict=True)
]


def number(of_version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", of_version)]


def needs(package: str) -> None:
    """Skip a test where a library is missing, or older than the page. A newer one may have learnt something."""
    for name in ("jax", package):
        try:
            found = version(name)
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
        if number(found) < number(VERSIONS[name]):
            pytest.skip(f"the page is about {name} {VERSIONS[name]}, and this is {found}")


def locked(file: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE))


def test_versions_are_those_of_the_locks() -> None:
    """Other versions may give other words: change the versions of the page, and let the tests tell which cells."""
    assert {name: locked("requirements.lock")[name] for name in VERSIONS} == VERSIONS
    assert VERSIONS.keys() == set(PACKAGES.values())
    newest = locked("requirements-newest.lock")
    others = "jax {jax}, equinox {equinox} and flax {flax}".format(**newest)
    says(f"The words for loopax, jax.lax, Equinox and Flax NNX are the same with {others}.")


def test_each_column_has_its_programs() -> None:
    assert {heading: lines[0][1:] for heading, lines in TABLES.items()} == {
        heading: list(columns) for heading, columns in EVIDENCE.items()
    }


def test_tables_can_be_read_on_a_phone() -> None:
    assert all(len(line) <= 4 for lines in TABLES.values() for line in lines)
    assert all(lines[1][0].startswith("loopax") for lines in TABLES.values())


@pytest.mark.slow  # what loopax can do is tested elsewhere, and what a peer can do changes with its version
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell) -> None:
    if not cell.row.startswith("loopax"):
        needs(PACKAGES[cell.row.split(maxsplit=1)[0]])
    if cell.column in {"NNX", "states"}:  # a model of another library, in each of the loops
        needs({"NNX": "flax", "states": "brainstate"}[cell.column])
    found = EVIDENCE[cell.heading][cell.column](cell.row)
    place = f"docs/comparison.md, {cell.heading!r}: row {cell.row!r}, column {cell.column!r}"
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS if is_installed(name))
    assert cell.word == found, f"{place} says {cell.word!r}, the program gives {found!r} ({versions}). Change the cell."


def says(text: str) -> None:
    """The page has a sentence, wherever its lines break."""
    assert text in " ".join(PAGE.read_text().split()), "the page no longer says what this test tries"


def test_row_of_a_buffer_that_is_overwritten() -> None:
    """A window of four rows as a ring: the gradient is that of a `History`, and Equinox's `buffers=` has another."""
    says("A body that overwrites a row of such a buffer gets a wrong gradient, without an error")
    needs("equinox")
    size, steps = 4, 12

    def ring(x: Any, **options: Any) -> Any:
        def body(carry: Any) -> Any:
            i, rows = carry
            row = jnp.sin(rows[(i - 1) % size]) * 0.9 + 0.1 * rows[i % size] * x
            return i + 1, rows.at[i % size].set(row)

        init = (jnp.zeros((), int), jnp.ones(size) * x)
        loop = programs.WHILE_LOOPS["Equinox checkpointed"]
        return loop(lambda carry: carry[0] < steps, body, init, steps, **options)[1].sum()

    def history(x: Any) -> Any:
        body = lambda _, rows: rows.push(jnp.sin(rows[-1]) * 0.9 + 0.1 * rows[0] * x)
        past = lx.History(size, jnp.ones(size) * x)
        return lx.fori_loop(0, steps, body, past).rows.sum()

    x = jnp.asarray(0.7)
    right = jax.grad(history)(x)
    with_buffers = jax.grad(lambda x: ring(x, buffers=lambda carry: carry[1]))(x)
    assert np.allclose(jax.grad(ring)(x), right)
    assert not np.allclose(with_buffers, right, rtol=0.5)
