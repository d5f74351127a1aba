"""`python -m loopax calibrate` writes a file, and what is traced after `set_calibration` uses it."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax.__main__ import main
from loopax._command import calibrate as probes
from loopax._src import calibration
from loopax._src.core.jaxpr.cost import Costs, costs

START = jnp.linspace(0.1, 0.9, 64)


@pytest.fixture(autouse=True)
def _constants_of_loopax():
    yield
    lx.set_calibration(None)


@pytest.fixture
def small_probes(monkeypatch):
    """Programs of a few operations, measured once."""
    few = [probes.Probe((name,), 2.0, jnp.sin, (START,), 1e3) for name in Costs._fields]
    monkeypatch.setattr(probes, "probes", lambda: few)
    monkeypatch.setattr(probes, "ROUNDS", 1)


def written(tmp_path, **changes):
    path = tmp_path / "costs.json"
    calibration.write(path, Costs()._replace(**changes), "a machine")
    return path


def taken():
    """The kind that `Auto` takes: many functions of a state, of which residuals are stored or not."""

    def energy(h):
        body = lambda _, h: jnp.tanh(h) * jnp.exp(-h * h) + 0.1 * h
        return lx.fori_loop(0, 50, body, h).sum()

    stored = lx.explain(energy, START).loops[0].stored
    assert stored is not None
    return stored.kind


def test_every_constant_has_one_probe():
    names = [name for probe in probes.probes() for name in probe.constants]
    assert sorted(names) == sorted(Costs._fields)


def test_constants_are_scaled_by_their_probes():
    found = [probes.Probed(probe.constants, 1.0, 2.0) for probe in probes.probes()]
    assert probes.scaled(found) == pytest.approx([2 * value for value in Costs()])


@pytest.mark.slow  # the probes themselves: some seconds
def test_probes_measure_this_machine():
    found = probes.measured()
    assert all(0 < probed.nanoseconds < 1e6 for probed in found)


@pytest.mark.usefixtures("small_probes")
def test_command_writes_a_file(tmp_path, capsys):
    path = tmp_path / "costs.json"
    assert main(["calibrate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*Costs._fields, str(path), "set_calibration", "LOOPAX_CALIBRATION"))
    lx.set_calibration(path)
    assert costs() != Costs()
    assert all(value > 0 for value in costs())


def test_command_needs_a_folder(tmp_path, capsys):
    assert main(["calibrate", str(tmp_path / "nowhere" / "costs.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_choices_follow_the_calibration(tmp_path):
    names = []
    for changes in ({"function": 1e3}, {"cached_byte": 1e3}, {"function": 1e3}):
        lx.set_calibration(written(tmp_path, **changes))
        names.append(taken())
    assert names == ["Residuals()", "Bounded()", "Residuals()"]


def test_compiled_programs_are_traced_again(tmp_path):
    traced = []

    @jax.jit
    def program(h):
        traced.append(1)
        return h + 1

    program(START)
    lx.set_calibration(written(tmp_path))
    program(START)
    assert len(traced) == 2


def test_none_is_what_loopax_brings(tmp_path):
    lx.set_calibration(written(tmp_path, product=5.0))
    assert costs().product == 5.0
    lx.set_calibration(None)
    assert costs() == Costs()


def broken(**changes):
    return json.dumps({"nanoseconds": {**Costs()._asdict(), **changes}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "is not a calibration: it holds no nanoseconds"),
        ("[1]", "is not a calibration: it holds no nanoseconds"),
        ('{"nanoseconds": 3}', "is not a calibration: it holds no nanoseconds"),
        ('{"nanoseconds": {"product": 1}}', r"of other operations. Got \['product'\], expected \['cached_byte'"),
        (broken(product=-1.0), "Got {'product': -1.0}, expected positive numbers"),
        (broken(product="1"), "Got {'product': '1'}, expected positive numbers"),
        (broken(product=float("inf")), "Got {'product': inf}, expected positive numbers"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as found:
        lx.set_calibration(path)
    assert str(path) in str(found.value)
    assert "python -m loopax calibrate FILE" in str(found.value)
    assert costs() == Costs()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        lx.set_calibration(tmp_path / "costs.json")


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPAX_CALIBRATION", str(written(tmp_path, call=7.0)))
    calibration.use_environment()
    assert costs().call == 7.0
    monkeypatch.setenv("LOOPAX_CALIBRATION", str(tmp_path / "other.json"))
    with pytest.raises(FileNotFoundError) as found:
        calibration.use_environment()
    assert "LOOPAX_CALIBRATION" in found.value.__notes__[0]


@pytest.mark.slow  # a process of its own
def test_environment_is_read_with_the_first_name(tmp_path):
    program = "import loopax as lx; lx.scan; from loopax._src.core.jaxpr.cost import costs; print(costs().call)"
    environment = {"LOOPAX_CALIBRATION": str(written(tmp_path, call=7.0)), "PATH": ""}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "7.0"
