"""`python -m loopax doctor`: what fails is reported, and is the exit code; versions; copies in loops."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax.__main__ import main
from loopax._command import copies, cores, selftest
from loopax._command import installed as versions
from loopax._command.copies import CopyTest, Verdict, copied_in_steps, judge
from loopax._command.doctor import settings
from loopax._command.installed import Installed, in_range
from loopax._command.selftest import SelfTest


def swapped(capacity, x, n):
    """Two rows are read, and written in each other's place: XLA copies the array for that in every step."""

    def body(i, rows):
        first, second = rows[i], rows[(7 * i) % capacity]
        return rows.at[(7 * i) % capacity].set(first + 1).at[i].set(second)

    return lax.fori_loop(0, n, body, jnp.outer(jnp.arange(capacity, dtype=x.dtype), x)).sum()


def test_a_copy_in_every_step_is_found():
    verdict = judge(CopyTest("swapped", swapped), gradient=False)
    assert verdict.fails
    assert verdict.status.startswith("FAILS: copy f")
    assert "[2063,16] in every step" in verdict.status
    known = judge(CopyTest("swapped", swapped, known="so it is"), gradient=False)
    assert not known.fails
    assert known.status.startswith("copies, as is known (so it is): copy f")


def test_rows_in_place_are_well_unless_they_are_stored_again_and_again():
    one_row = lambda capacity, x, n: lax.fori_loop(
        0, n, lambda i, rows: rows.at[i].set(x), jnp.zeros((capacity, x.size))
    ).sum()
    verdict = judge(CopyTest("one row", one_row), gradient=False)
    assert verdict.copies == []
    assert verdict.status == "ok"
    assert Verdict("", 40.0, [], "").status == "FAILS: stores the rows 40 times"
    assert Verdict("", 40.0, [], "known").fails


@pytest.mark.parametrize("program", copies.programs(), ids=lambda p: p.name)
def test_loops_of_loopax(program):
    for verdict in (judge(program, gradient) for gradient in (False, True)):
        assert verdict.status == "ok" or (program.known and "as is known" in verdict.status)


HLO = """HloModule program

%fused (p: f32[100,2], q: f32[2]) -> f32[100,2] {
  %p = f32[100,2]{1,0} parameter(0)
  %wide = f32[100,2]{1,0} broadcast(%q), dimensions={1}
  ROOT %written = f32[100,2]{1,0} FUSED
}

%step (s: (s32[], f32[100,2])) -> (s32[], f32[100,2]) {
  %c = f32[100,2]{1,0} STEP
  %f = f32[100,2]{1,0} fusion(%c), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[100,2]{1,0}) tuple(%i, %f)
}

%goes_on (s: (s32[], f32[100,2])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%block (s: (s32[], f32[100,2])) -> (s32[], f32[100,2]) {
  %kept = f32[100,2]{1,0} copy(%c)
  ROOT %w = (s32[], f32[100,2]{1,0}) while(%s), condition=%goes_on, body=%step
}

ENTRY %main (x: f32[100,2]) -> f32[100,2] {
  %outside = f32[100,2]{1,0} copy(%x)
  %w = (s32[], f32[100,2]{1,0}) while(%s), condition=%goes_on, body=%block
  ROOT %y = f32[100,2]{1,0} get-tuple-element(%w), index=1
}
"""


COUNTED = [
    ("bitcast(%b)", "dynamic-update-slice(%p, %wide, %i)", []),
    ("copy(%b)", "dynamic-update-slice(%p, %wide, %i)", ["copy f32[100,2]"]),
    ("add(%a, %b)", "dynamic-update-slice(%p, %wide, %i)", ["add f32[100,2]"]),
    ("bitcast(%b)", "select(%p, %wide)", ["select f32[100,2]"]),
    ("copy(%b)", "copy(%p)", ["copy f32[100,2]"] * 2),
]


@pytest.mark.parametrize(("step", "fused", "found"), COUNTED)
def test_what_counts(step, fused, found):
    """Steps of innermost loops; in a fusion its result, whatever it is made of on the way."""
    text = HLO.replace("STEP", step).replace("FUSED", fused)
    assert copied_in_steps(text, 200) == found
    assert copied_in_steps(text, 201) == []


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
    ("1.5", "<1.5.0", False),
    ("1.5", "", True),
    ("0.11.1", ">=0.10.0,!=0.11.1", False),
    ("0.11.2", ">=0.10.0,!=0.11.1", True),
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
