"""`python -m loopax doctor`: what fails is reported, and is the exit code; versions; copies in loops."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest

import loopax as lx
from loopax.__main__ import main
from loopax._command import copies, cores, selftest
from loopax._command import installed as versions
from loopax._command.copies import CopyTest
from loopax._command.doctor import settings
from loopax._command.installed import Installed, in_range
from loopax._command.selftest import SelfTest
from tests.command.copying import swapped


@pytest.mark.slow
def test_all_is_well_here():
    """The whole of it, as users call it."""
    done = subprocess.run([sys.executable, "-m", "loopax", "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("all is well")
    assert "FAILS" not in done.stdout
    parts = ["Versions", "8 x cpu", "shard_map of vmap of grad, devices: 8", "run-time check raises", "Buffer, "]
    assert all(words in done.stdout for words in parts)


@pytest.fixture
def quick(monkeypatch):
    """Without the checks that take long."""
    monkeypatch.setattr(copies, "programs", list)
    monkeypatch.setattr(selftest, "checks", list)
    monkeypatch.setattr(cores, "usable", lambda: 1)
    return monkeypatch


def test_lanes_over_cores(quick, capsys):
    assert main(["doctor"]) == 0
    assert "all is well" in capsys.readouterr().out
    quick.setattr(cores, "usable", lambda: 2)
    quick.setattr(cores, "gains", lambda number: [cores.Gain("sequential", 0.008, 0.004 * number / 2)])
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "2 CPU devices" in shown
    assert shown.split("sequential")[1].split()[:3] == ["8.0", "4.0", "2.0"]

    def ended(_):
        raise subprocess.CalledProcessError(1, "python")

    quick.setattr(cores, "gains", ended)
    assert main(["doctor"]) == 1
    assert "lanes over cores" in capsys.readouterr().out


def test_a_broken_transformation_is_reported(quick, capsys):
    kept = [check for check in selftest._derivatives() if check.name in ("jvp", "jax.linearize")]
    quick.setattr(selftest, "checks", lambda: kept)

    def broken(*_):
        raise ValueError("out of order\nand so on")

    quick.setattr(jax, "linearize", broken)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["jvp", "ok"] for line in lines)
    assert any(line.startswith("jax.linearize") and "FAILS: ValueError: out of order" in line for line in lines)
    assert lines[-1] == "1 failed (jax.linearize)"


def test_branches_are_right():
    assert [(check.name, selftest.run(check)) for check in selftest._branches()] == [
        (f"{name}, grad of vmap{lanes}", "") for lanes in ("", ", compact lanes") for name in ("cond", "switch")
    ]


def test_a_gradient_through_a_branch_that_is_not_taken_is_reported(quick, capsys):
    quick.setattr(selftest, "checks", selftest._branches)

    def both(pred, true_fun, false_fun, x, lanes):
        del lanes
        return jax.numpy.where(pred, true_fun(x), false_fun(x))

    quick.setattr(lx, "cond", both)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "nan" in out
    assert "2 failed (cond, grad of vmap; cond, grad of vmap, compact lanes)" in out


def test_a_version_out_of_range_and_a_copy_in_every_step_are_reported(quick, capsys):
    quick.setattr(versions, "found", lambda: [Installed("jax", "0.4.1", ">=0.10.0", "")])
    quick.setattr(copies, "programs", lambda: [CopyTest("swapped", swapped)])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAILS: copy f64[2063,16] in every step" in out
    assert "FAILS: ValueError: Reverse-mode differentiation does not work for lax.while_loop" in out
    assert "3 failed (jax; swapped, forward; swapped, gradient)" in out


def test_answers_are_compared():
    ones = np.ones(2)
    answers = [
        (1.0, 1.0, ""),
        (ones, [1.0, 1.00001], ""),
        (1.001, 1.0, "got 1.001, expected 1.0"),
        (ones, 1.0, "got [1.0, 1.0], expected 1.0"),
        (float("nan"), 1.0, "got nan, expected 1.0"),
    ]
    for got, wanted, error in answers:
        assert selftest.run(SelfTest("this", lambda got=got, wanted=wanted: (got, wanted))) == error


def test_settings_say_what_is_unusual(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " --one=1 --two=2 --one=1")
    with jax.debug_nans(True), jax.enable_x64(False):
        found = {setting.name: setting for setting in settings()}
    assert found["jax_debug_nans"].value == "True"
    assert "a NaN in any result is an error" in found["jax_debug_nans"].note
    assert found["jax_debug_infs"].note == ""
    assert found["jax_enable_x64"].note == "float64 becomes float32"
    assert found["devices"].value.startswith("8 x cpu")
    assert [setting.value for setting in settings() if setting.name == "XLA_FLAGS"] == ["--one=1", "--two=2"]
    assert found["compilation cache"].value == "off"


ROOT = Path(__file__).parents[2]


RANGES = [
    ("0.10.2", ">=0.10.0", True),
    ("0.9.9", ">=0.10.0", False),
    ("0.10", ">=0.10.0", True),
    ("0.12.0.1", ">=0.10.0,<0.12", False),
    ("0.11.9", ">=0.10.0, <0.12", True),
    ("0.12.8.dev3", ">=0.12.8", True),
    ("2.0.0rc1", ">=2.0.0", True),
    ("3.11.7+local", ">=3.11", True),
    ("1.5", "!=1.5.0", False),
    ("1.5", "==1.5.0", True),
    ("1.5", "", True),
]


def test_ranges():
    for version, wanted, inside in RANGES:
        assert in_range(version, wanted) is inside, (version, wanted)
    with pytest.raises(ValueError, match="~=1"):
        in_range("1.5", "~=1.4")


def test_all_ranges_of_the_package_are_understood():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [*project["dependencies"], *(name for extra in extras for name in extra)]
    assert all(versions._parsed(requirement).wanted.startswith(">=") for requirement in required)
    assert all(in_range("99.0", versions._parsed(requirement).wanted) for requirement in required)


def test_what_the_package_names_is_found(monkeypatch):
    """The ranges come from the package, not from a second list."""
    required = ["jax>=0.10.0", "numpy>=99", 'no-such-package>=1.0; extra == "flax"', "nor-this-one>=2"]
    monkeypatch.setattr(metadata, "requires", lambda _: required)
    found = {package.name: package for package in versions.found()}
    assert list(found) == ["Python", "loopax", "jax", "jaxlib", "numpy", "no-such-package", "nor-this-one"]
    assert found["jax"].status == "ok"
    assert found["numpy"] == Installed("numpy", metadata.version("numpy"), ">=99", "")
    assert found["numpy"].status == "out of range"
    assert found["no-such-package"].status == "not installed: pip install loopax[flax]"
    assert found["nor-this-one"].status == "FAILS: not installed"
    assert [package.name for package in found.values() if package.fails] == ["numpy", "nor-this-one"]
    assert Installed("flax", "0.1", ">=0.12.8", "flax").fails  # also where it is optional
