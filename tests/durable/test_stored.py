"""Runs that earlier versions of loopax have stored: they go on, or the error names the version that stored them."""

import functools as ft
import json
import tarfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import pytest

import loopax as lx
from loopax import durable
from loopax._src.durable import equations
from loopax._src.durable import run as job
from tests.durable.cases import Steps, read_rows, same_bits, stopped
from tests.durable.stored_programs import PROGRAMS
from tests.support.reference import assert_close

STORED = Path(__file__).parent / "stored"


def unpack(name: str, directory: Path) -> Path:
    """The stored runs of this name."""
    with tarfile.open(STORED / f"{name}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return directory / name


def test_the_stored_programs_are_what_they_are(tmp_path: Any) -> None:
    """Each archive holds an interrupted run of each program of its time."""
    assert {p.name for p in unpack("format1", tmp_path).iterdir()} == {"outputs", "loops"}
    assert {p.name for p in unpack("format2", tmp_path).iterdir()} == set(PROGRAMS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Callable[[str], Any]:
    """What a run gives that nobody has interrupted."""
    return ft.cache(lambda name: read_rows(PROGRAMS[name](tmp_path_factory.mktemp(name), Steps())))


def goes_on(name: str, directory: Path, expected: Any) -> None:
    """To the results of a whole run, in three steps more."""
    steps = Steps()
    result = PROGRAMS[name](directory, steps)
    jax.effects_barrier()
    assert_close(read_rows(result), expected)
    assert sorted(steps.taken) == [9, 10, 11]


@contextmanager
def maybe_another_jax(directory: Path) -> Iterator[None]:
    """A warning that says so if and only if it is another version of JAX."""
    stored = json.loads((directory / "program.json").read_text())["jax"]
    if stored == jax.__version__:
        yield
        return
    with pytest.warns(durable.AnotherProgramWarning, match=f"another version of JAX: stored {stored}, now"):
        yield


def rename_primitives(monkeypatch: Any) -> None:
    for i, primitive in enumerate([*equations.OWN, equations.retyped_p, equations.fill_inactive_p]):
        monkeypatch.setattr(primitive, "name", f"renamed_{i}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_stored_in_format_2_go_on(name: str, whole: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """Also when loopax's primitives have other names than they had, and under JAX 0.12.

    Another JAX may trace the user's own operations to another program, as 0.10.0 does with `jnp.stack`. It says so.
    """
    expected = whole(name)
    rename_primitives(monkeypatch)
    directory = unpack("format2", tmp_path) / name
    if (name, jax.__version__) == ("loops", "0.10.0"):
        with pytest.raises(ValueError, match=r"(?s)JAX: stored 0\.10\.2, now 0\.10\.0.* = stack axis=0 "):
            goes_on(name, directory, expected)
    else:
        with maybe_another_jax(directory):
            goes_on(name, directory, expected)


@pytest.mark.parametrize("name", ["outputs", pytest.param("loops", marks=pytest.mark.slow)])
def test_runs_stored_in_format_1_go_on_or_name_the_version(name: str, whole: Any, tmp_path: Any) -> None:
    """They go on while loopax's and JAX's text of the program is the one that was stored."""
    directory = unpack("format1", tmp_path) / name
    refused = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", durable.AnotherProgramWarning)  # another JAX may write the same text
            goes_on(name, directory, whole(name))
    except ValueError as error:
        refused = str(error)
    assert not refused or "was stored by loopax 0.1.0 and JAX 0.10.2 (format 1), and this is loopax" in refused
    assert json.loads((directory / "program.json").read_text())["format"] == (1 if refused else 2)


def test_a_run_of_format_1_is_refused_by_version_when_primitives_have_other_names(
    tmp_path: Any, monkeypatch: Any
) -> None:
    rename_primitives(monkeypatch)
    directory, steps = unpack("format1", tmp_path) / "outputs", Steps()
    with pytest.raises(ValueError, match=r"was stored by loopax 0\.1\.0 and JAX 0\.10\.2 \(format 1\)") as error:
        PROGRAMS["outputs"](directory, Steps())
    assert f"and this is loopax {lx.__version__} and JAX {jax.__version__} (format 2)" in str(error.value)
    assert 'If the functions are the same, give resume="anyway", or go on with the versions' in str(error.value)
    with pytest.warns(durable.AnotherProgramWarning, match="going on with a run of another program"):
        PROGRAMS["outputs"](directory, steps, resume="anyway")
    jax.effects_barrier()
    assert sorted(steps.taken) == [9, 10, 11]
    assert json.loads((directory / "program.json").read_text())["format"] == 2


def test_a_run_of_format_1_whose_text_is_the_same_goes_on(whole: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """And one whose text is another does not, whatever version of JAX has stored it."""
    steps = Steps()
    directory, path = tmp_path / "run", tmp_path / "run" / "program.json"
    descriptions = []
    settle = job.settle_program
    spied = lambda *args: (descriptions.append(asdict(args[3]())), settle(*args))
    monkeypatch.setattr(job, "settle_program", spied)
    stopped(lambda: (PROGRAMS["outputs"](directory, Steps(9)), jax.effects_barrier()))
    first = {key: value for key, value in descriptions[0].items() if key not in ("python", "callbacks")}
    assert first["format"] == 1
    for change in ({"text": [*first["text"], "more"]}, {"values": {**first["values"], "key": "0"}}):
        path.write_text(json.dumps({**first, **change}))
        with pytest.raises(ValueError, match=r"stored by loopax .* \(format 1\), and this is loopax .* \(format 2\)"):
            PROGRAMS["outputs"](directory, Steps())
    path.write_text(json.dumps(first))
    result = PROGRAMS["outputs"](directory, steps)
    jax.effects_barrier()
    same_bits(read_rows(result), whole("outputs"))
    assert sorted(steps.taken) == [9, 10, 11]
    assert json.loads(path.read_text())["format"] == 2
