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
from jax import lax
from jax.experimental import checkify

import loopax as lx
from loopax._src.extras import is_installed
from tests.project import comparison_programs as programs
from tests.project import comparison_solvers as solvers
from tests.project.comparison_programs import YES, brainstate, has_no_argument, peer, works
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
    "A bound that is too low": {"error": solvers.error_at_bound, "flag": solvers.flag_at_bound},
    "Models in the carry": {"Equinox": programs.equinox_model, "NNX": programs.nnx_model, "states": programs.state},
    "Weights in the carry": {"stored once": programs.stored_once, "shared": programs.shared},
    "Lanes over devices": {
        "values": partial(programs.over_devices, lambda f: f),
        "gradient": partial(programs.over_devices, jax.grad),
    },
    "Differential equations": {mode: partial(solvers.of_decay, mode) for mode in ("reverse", "forward", "rev/rev")},
    "Fixed points": {mode: partial(solvers.of_fixed_point, mode) for mode in ("reverse", "forward", "rev/rev")},
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

FAST = {"Gradient of a while loop", "A batch of loops"}


def parameters() -> list[Any]:
    """All cells. What loopax can do is tested elsewhere, and what a peer can do changes with its version."""
    is_fast = lambda cell: cell.row.startswith("loopax") and cell.heading in FAST
    return [pytest.param(cell, marks=[] if is_fast(cell) else pytest.mark.slow, id=str(cell)) for cell in CELLS]


def package_of(row: str) -> str:
    return PACKAGES[row.split(maxsplit=1)[0]]


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


def versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in VERSIONS if is_installed(name))


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


@pytest.mark.parametrize("cell", parameters())
def test_cell(cell: Cell) -> None:
    if not cell.row.startswith("loopax"):
        needs(package_of(cell.row))
    if cell.column in {"NNX", "states"}:  # a model of another library, in each of the loops
        needs({"NNX": "flax", "states": "brainstate"}[cell.column])
    found = EVIDENCE[cell.heading][cell.column](cell.row)
    place = f"docs/comparison.md, {cell.heading!r}: row {cell.row!r}, column {cell.column!r}"
    assert cell.word == found, (
        f"{place} says {cell.word!r}, the program gives {found!r} ({versions()}). Change the cell."
    )


# Sentences of the page outside of its tables.


def says(text: str) -> None:
    """The page has a sentence, wherever its lines break."""
    assert text in " ".join(PAGE.read_text().split()), "the page no longer says what this test tries"


def test_checkpointed_loop_in_a_checkpointed_loop() -> None:
    says("In a checkpointed loop of Equinox whose body holds another one, `jax.jvp` of a gradient is an error")
    needs("equinox")
    loop = programs.WHILE_LOOPS["Equinox checkpointed"]

    def nested(x: Any) -> Any:
        def outer(carry: Any) -> Any:
            body = lambda inner: (inner[0] + 1, inner[1] * x)
            return carry[0] + 1, loop(lambda inner: inner[0] < 2, body, (jnp.zeros((), int), carry[1]), 2)[1]

        return loop(lambda carry: carry[0] < 2, outer, (jnp.zeros((), int), x * 0 + 1), 2)[1]

    x = jnp.asarray(2.0)
    assert works(lambda: jax.grad(nested)(x), 32.0) == YES
    assert works(lambda: programs.tangent(jax.grad(nested))(x), 48.0) == "no"


ABSENT = [
    *(("The other scans have no such argument", row) for row in ("jax.lax scan", "Flax NNX scan", "brainstate scan")),
    ("The other scans have no such argument", "Equinox checkpointed scan"),
    *(
        ("`jax.lax`, Flax NNX and Equinox loops have no such argument", row)
        for row in ("jax.lax", "Flax NNX", "Equinox checkpointed")
    ),
    ("the scans of brainstate have `pbar=`", "brainstate scan"),  # beside which there is no other
]


@pytest.mark.parametrize(("sentence", "row"), ABSENT)
def test_arguments_that_others_do_not_have(sentence: str, row: str) -> None:
    says(sentence)
    needs(package_of(row))
    assert has_no_argument(row) == "no"


def test_scan_that_ends_early() -> None:
    says("`lx.scan` can also end early: `stop=` gets the carry and the row of each step")
    xs = jnp.arange(9.0)
    assert lx.scan(lambda c, x: (c + x, x), 0.0, xs, stop=lambda c, _: c > 7.0)[0] == 10.0


def test_weights_that_a_body_closes_over() -> None:
    says("a body may also close over its weights. The weights are then neither stored with checkpoints nor copied")
    needs("equinox")
    row = "Equinox checkpointed"
    assert programs.stored_once(row, closed_over=True) == YES
    assert programs.shared(row, closed_over=True) == YES


@pytest.mark.slow
def test_direct_adjoint_without_a_bound() -> None:
    says("`DirectAdjoint` needs `max_steps=` for reverse mode")
    needs("diffrax")
    with pytest.raises(RuntimeError, match="Cannot reverse-mode autodifferentiate"):
        jax.grad(solvers.decay("Diffrax Direct", max_steps=None))(0.7)


@pytest.mark.slow
def test_diffrax_goes_on_from_a_state() -> None:
    says("Diffrax returns the state of a solver, and continues from it")
    needs("diffrax")
    diffrax = peer("diffrax")
    saveat = diffrax.SaveAt(t1=True, solver_state=True)
    half = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, a: -a * y), diffrax.Tsit5(), 0.0, 0.5, 0.25, jnp.ones(()), 0.7, saveat=saveat
    )
    whole = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, a: -a * y),
        diffrax.Tsit5(),
        0.5,
        1.0,
        0.25,
        half.ys[0],
        0.7,
        solver_state=half.solver_state,
    )
    assert np.allclose(whole.ys[0], np.exp(-0.7), rtol=1e-4)


def test_progress_of_diffrax() -> None:
    says("Diffrax has `progress_meter=`")
    needs("diffrax")
    assert issubclass(peer("diffrax").TextProgressMeter, peer("diffrax").AbstractProgressMeter)


def test_keys_of_loopax() -> None:
    says("loopax gives the body a key (`key=`)")
    step = lambda carry, _, key: (carry, jax.random.normal(key))
    drawn = lx.scan(step, 0.0, length=3, key=jax.random.key(0))[1]
    assert len(set(drawn.tolist())) == 3


def test_keys_of_brainstate() -> None:
    says("brainstate keeps the key of `brainstate.random` as a state")
    needs("brainstate")
    library = brainstate()
    library.random.seed(0)
    drawn = library.transform.for_loop(lambda _: library.random.rand(dtype=jnp.float64), jnp.arange(3))
    assert len(set(drawn.tolist())) == 3


def test_masks_of_nnx() -> None:
    says("A module that `nnx.scan` broadcasts (`in_axes=None`) draws the same mask in every step")
    needs("flax")
    nnx = peer("flax.nnx")
    ones = jnp.ones((3, 8))

    def broadcast(module: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        return carry, module(x)

    scan = nnx.scan(broadcast, in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    same = scan(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jnp.zeros(()), ones)[1]
    assert np.ptp(same, axis=0).max() == 0

    says("or put an NNX module with dropout into the carry")
    carried = lax.scan(lambda module, x: (module, module(x)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)), ones)[1]
    assert np.ptp(carried, axis=0).max() > 0


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


def test_checkify() -> None:
    says("`jax.experimental.checkify` looks into `jax.lax` loops, and not into loops of loopax")
    needs("jax")

    def checked(fori_loop: Any) -> Any:
        loop = lambda x: fori_loop(0, 3, lambda _, y: jnp.log(y), x)
        return checkify.checkify(loop, errors=checkify.float_checks)(2.0)

    assert "nan generated" in checked(lax.fori_loop)[0].get()
    with pytest.raises(NotImplementedError, match="does not look into loops"):
        checked(lx.fori_loop)


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [
        ("jax", "jax.ad_checkpoint", "print_saved_residuals"),
        ("flax", "flax.nnx", "StateAxes"),
        ("diffrax", "diffrax", "BacksolveAdjoint"),
        ("optimistix", "optimistix", "ImplicitAdjoint"),
    ],
)
def test_names(package: str, module: str, name: str) -> None:
    assert re.search(rf"`(\w+\.)*{name}`", PAGE.read_text())
    needs(package)
    assert hasattr(peer(module), name)


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("loopax is tested on CPUs", "the tests run on CPUs, wherever they run"),
        ("The tables do not contain Enzyme-JAX", "it is not among the locked packages"),
        ("With the other loops, save the carry between two calls", "there is nothing to call"),
        ("Diffrax has methods for ordinary, stochastic and controlled", "what solvers can do is not about loops"),
        ("optimistix has root finders, fixed-point iterations", "what solvers can do is not about loops"),
    ],
)
def test_what_no_program_tries(sentence: str, reason: str) -> None:
    """Sentences that a reader has to believe: the list has to be right, too."""
    assert reason
    readable = PAGE.read_text().replace("**", "")
    assert sentence in " ".join(readable.split())
