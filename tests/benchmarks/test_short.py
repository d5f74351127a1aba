"""`python -m benchmarks --short`: every library computes the same, failures are rows, and files are written."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.short import beside_peers, programs
from benchmarks.short.measure import QUICK, Contender, Program, measure
from benchmarks.short.options import main
from tests.support.example_files import precision_of_a_user

HAS_DIFFRAX = importlib.util.find_spec("diffrax") is not None  # not in all environments
NEW_RULES = any(getattr(jax.config, flag, False) for flag in ("jax_custom_jvp3", "jax_custom_vjp3"))
LIBRARIES = {
    "neural_ode": {"Equinox", "jax.lax, to the bound", "Flax NNX, to the bound", *(["Diffrax"] if HAS_DIFFRAX else [])},
    "ragged": {"Equinox", "jax.lax, to the bound", "Flax NNX, to the bound"},
    "uneven": {"Equinox", "jax.lax", "Flax NNX"},
    "small_body": {"Equinox", "jax.lax", "Flax NNX"},
}


LARGE = [programs.neural_ode]  # with solvers of several libraries


@pytest.mark.parametrize(
    "build",
    [pytest.param(build, marks=pytest.mark.slow) if build in LARGE else build for build in programs.programs()],
    ids=lambda f: f.__name__,
)
def test_all_libraries_compute_the_same(build):
    with precision_of_a_user():
        rows = measure(build(QUICK), rounds=1)
    assert {row.library for row in rows if not row.library.startswith("loopax")} == LIBRARIES[build.__name__]
    assert rows[0].library.startswith("loopax")
    assert rows[0].ratio == 1.0
    for row in rows:
        if row.library == "Equinox" and NEW_RULES and build is programs.ragged and row.note:
            # Some versions of JAX refuse Equinox's rule.
            assert "under vmap, the custom_vjp function" in row.note or "Non-hashable static arguments" in row.note
            continue
        assert row.note == "", row
        assert row.milliseconds is not None
        assert row.temporary_mib is not None
        assert (row.steps_per_second is not None) == (build.__name__ == "small_body")


def contenders():
    def broken(x):
        raise ValueError("no such thing\nand more")

    functions = {"loopax": jnp.sin, "same": jnp.sin, "other": jnp.cos, "broken": broken, "shape": lambda x: x[:1]}
    return [Contender(name, function) for name, function in functions.items()]


def test_failures_and_other_results_are_rows():
    rows = {row.library: row for row in measure(Program("sines", contenders(), (jnp.ones(3),)), rounds=2)}
    assert rows["same"].note == ""
    assert rows["other"].note.startswith("another result: 3.6e-01 away")
    assert rows["shape"].note == "another result"
    assert rows["broken"].note == "ValueError: no such thing"
    assert rows["broken"].milliseconds is None


def one_program(monkeypatch, functions):
    monkeypatch.setattr(
        beside_peers, "programs", lambda: [lambda _: Program("sines", functions, (jnp.ones(3),), steps=3)]
    )


def test_files(monkeypatch, tmp_path, capsys):
    one_program(monkeypatch, contenders())
    files = tmp_path / "figures.json", tmp_path / "figure.svg"
    assert main(["--short", "--json", str(files[0]), "--figure", str(files[1])]) == 0
    written = json.loads(files[0].read_text())
    assert written["versions"].keys() - {"diffrax"} == {"loopax", "jax", "jaxlib", "equinox", "flax"}
    assert written["machine"]
    assert [row["library"] for row in written["measured"]] == ["loopax", "same", "other", "shape", "broken"]
    assert "<svg" in files[1].read_text()
    lines = capsys.readouterr().out.splitlines()
    assert "sines" in lines
    assert any(line.split() == ["broken", "ValueError:", "no", "such", "thing"] for line in lines)


def test_loopax_that_fails_is_the_exit_code(monkeypatch, capsys):
    broken, fine = contenders()[3], contenders()[1]
    one_program(monkeypatch, [Contender("loopax", broken.function), fine])
    assert main(["--short"]) == 1
    assert "no such thing" in capsys.readouterr().out
