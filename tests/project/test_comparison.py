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
from tests.project import loops_elsewhere as elsewhere
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "comparison.md"

# The first words of rows, and the packages that they are about.
PACKAGES = {
    "jax.lax": "jax",
    "Flax": "flax",
    "Equinox": "equinox",
    "brainstate": "brainstate",
    "Diffrax": "diffrax",
    "gradsolve": "gradsolve",
    "optimistix": "optimistix",
    "jax-tap": "jax-tap",  # has no loops, so no row
}
# Those outside of JAX are in no lock.
ELSEWHERE = {"PyTorch": "torch", "Dr.Jit": "drjit"}
VERSIONS_ELSEWHERE = {"torch": "2.13.0", "drjit": "1.5.0"}

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
    "Loops elsewhere": {mode: partial(elsewhere.derivative, mode) for mode in ("reverse", "forward", "rev/rev")},
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
        expected = (VERSIONS | VERSIONS_ELSEWHERE)[name]
        if number(found) < number(expected):
            pytest.skip(f"the page is about {name} {expected}, and this is {found}")
    if package == "drjit" and not elsewhere.has_llvm():
        pytest.skip("Dr.Jit finds no LLVM")


def locked(file: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE))


def test_versions_are_those_of_the_locks() -> None:
    """Other versions may give other words: change the versions of the page, and let the tests tell which cells."""
    assert {name: locked("requirements.lock")[name] for name in VERSIONS} == VERSIONS
    assert VERSIONS.keys() == set(PACKAGES.values())
    newest = locked("requirements-newest.lock")
    others = "jax {jax}, equinox {equinox} and flax {flax}".format(**newest)
    says(f"The words for loopax, jax.lax, Equinox and Flax NNX are the same with {others}.")
    says("PyTorch {torch} and Dr.Jit {drjit} (with LLVM), on a CPU".format(**VERSIONS_ELSEWHERE))


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
        needs((PACKAGES | ELSEWHERE)[cell.row.split(maxsplit=1)[0]])
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


def test_replayed_steps_are_those_of_where_they_were_recorded() -> None:
    """gradsolve's steps for one a are not small enough for another, and nothing says so."""
    says("recorded at a = 0.7 and replayed at a = 20, y(1) is 19040 in place of 2·10⁻⁹, and no error is raised")
    says("`grad_closure` cannot be called inside `jit`")
    needs("gradsolve")
    solution = programs.replayed(0.7)
    assert np.allclose(solution(jnp.asarray(0.7)), np.exp(-0.7))
    assert round(float(solution(jnp.asarray(20.0)))) == 19040
    record = lambda a: programs.peer("gradsolve").grad_closure(programs.Decay(), np.ones((1, 1)), a.reshape(1, 1))(a)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(record)(jnp.asarray(0.7))


def test_watching_a_loop_that_runs() -> None:
    """jax-tap sees `jax.lax` loops, and what loopax makes of its own."""
    says("Of a loop of loopax, `with jaxtap.record()` sees the loops of `jax.lax` that loopax makes of it")
    says("`jaxtap.record(f)` sees nothing of it")
    needs("jax-tap")
    jaxtap = programs.peer("jaxtap")

    def loop(row: str) -> Callable[[Any], Any]:
        return lambda x: programs.WHILE_LOOPS[row](lambda y: y < 100.0, lambda y: y * x, x, None)

    def seen_around(call: Callable[[], Any]) -> list[Any]:
        with jaxtap.record() as recorder:
            jax.block_until_ready(call())
        jax.effects_barrier()
        return [event.value for event in recorder.events]

    def seen_of(f: Callable[[Any], Any]) -> list[Any]:
        watched, recorder = jaxtap.record(f)
        jax.block_until_ready(watched(2.0))
        jax.effects_barrier()
        return [event.value for event in recorder.events]

    steps = [4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    assert [float(y) for (y,) in seen_around(lambda: loop("jax.lax")(2.0))] == steps
    assert [float(y) for (y,) in seen_of(loop("jax.lax"))] == steps
    of_loopax = seen_around(lambda: loop("loopax")(2.0))
    assert [float(carry[1]) for carry in of_loopax] == steps
    assert len(of_loopax[0]) > 1  # what loopax carries besides
    assert len(seen_around(lambda: jax.grad(loop("loopax"))(2.0))) > len(steps)
    assert not seen_of(loop("loopax"))


def test_recurrence_in_parallel() -> None:
    """An associative scan with its gradient, in the body of a loop; loopax has none of its own."""
    says("The body of a loop of loopax may call it.")
    assert not hasattr(lx, "associative_scan")
    combine = lambda left, right: (left[0] * right[0], right[1] + right[0] * left[1])
    parallel = lambda a, b: jax.lax.associative_scan(combine, (a, b))[1]
    step = lambda h, row: (h * row[0] + row[1],) * 2
    a, b = jnp.linspace(0.5, 0.9, 7), jnp.linspace(-1.0, 1.0, 7)

    def twice(recurrence: Callable[[Any, Any], Any], a: Any) -> Any:
        return lx.fori_loop(0, 2, lambda _, h: recurrence(a, h), b).sum()

    one_after_another = lambda a, b: lx.scan(step, jnp.zeros(()), (a, b))[1]
    found, expected = (jax.value_and_grad(partial(twice, f))(a) for f in (parallel, one_after_another))
    assert jax.tree.all(jax.tree.map(np.allclose, found, expected))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its own code
def test_while_loop_of_torch() -> None:
    """A weight in the body, for a first carry with and without a gradient, and a batch."""
    says("If no tensor of the first carry requires a gradient, `torch.while_loop` has a wrong gradient")
    says("`torch.func.vmap` of `torch.while_loop` is an error. It works for `scan`.")
    says('Its gradient was right here, with `combine_mode="generic"`')
    needs("torch")
    assert np.allclose(*elsewhere.slopes_of_a_weight("while_loop", requires_grad=True), rtol=1e-5)
    assert not np.allclose(*elsewhere.slopes_of_a_weight("while_loop", requires_grad=False), rtol=1e-2)
    assert np.allclose(*elsewhere.slopes_of_a_weight("scan", requires_grad=False), rtol=1e-5)
    assert np.allclose(*elsewhere.slopes_of_a_recurrence(), rtol=1e-5)
    assert np.allclose(elsewhere.batch("scan"), [16.0, 81.0])
    with pytest.raises(Exception, match="BatchedTensorImpl"):
        elsewhere.batch("while_loop")


@pytest.mark.slow
def test_loops_of_drjit() -> None:
    """Without a bound, with one that is too low, with that of a sum, with lanes that leave."""
    says("If more steps are taken than `max_iterations=` says, the values are right, and the gradient is wrong")
    says("Where lanes had left, forward mode gave 0, and reverse mode an error.")
    says("the finished lane causes no NaN")
    needs("drjit")
    with pytest.raises(RuntimeError, match="requires a 'max_iterations' hint"):
        elsewhere.drjit_power("reverse")
    for bound in (2, -1):
        value, slope = elsewhere.drjit_power("reverse", max_iterations=bound)
        assert value == [16.0]
        assert slope != [32.0]
    leaving = partial(elsewhere.drjit_power, lanes=(2.0, 3.0, 5.0), mode="evaluated", compress=True)
    assert leaving("forward") == ([16.0, 27.0, 25.0], [0.0, 0.0, 0.0])
    with pytest.raises(RuntimeError, match="differentiated"):
        leaving("reverse")
    for options in ({"max_iterations": 8}, {"mode": "evaluated"}):
        expected = [0.5, 0.5 * np.sum(1 / np.sqrt(np.arange(1.0, 6.0)))]
        assert np.allclose(elsewhere.drjit_roots(**options), expected, rtol=1e-5)
