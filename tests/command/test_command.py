"""The command: `--help` imports next to nothing, a subcommand no peer before it runs; its tables, demo, calibration."""

import io
import json
import re
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import loopax
import loopax as lx
from loopax.__main__ import SUBCOMMANDS, main
from loopax._command import calibrate as probes
from loopax._command import demo as volley
from loopax._command.table import show_table
from loopax._src import configuration, settings
from loopax._src.settings import CALIBRATIONS, DEFAULT_MEMORY, Costs, costs
from tests.support.example_files import precision_of_a_user

IMPORTED = """
import sys
before = set(sys.modules)
from loopax.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
print(*sorted(set(sys.modules) - before))
"""
NOT_FOR_HELP = {"jax", "equinox", "numpy", "scipy"}
PEERS = {"flax", "optax", "diffrax", "lineax", "matplotlib", "rich", "orbax", "tqdm", "benchmarks", "blackjax"}


def shown_and_imported(*arguments):
    command = [sys.executable, "-c", IMPORTED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown, _, modules = done.stdout.strip().rpartition("\n")
    return shown, set(modules.split())


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--help"], SUBCOMMANDS), (["--version"], [f"loopax {loopax.__version__}"])]
)
def test_help_imports_next_to_nothing(arguments, words):
    shown, found = shown_and_imported(*arguments)
    assert all(word in shown for word in words)
    assert {name for name in found if name.partition(".")[0] in NOT_FOR_HELP | PEERS} == set()
    assert len(found) < 120  # argparse and what it needs; JAX alone is several hundred


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_of_a_subcommand_imports_no_peer(name):
    shown, found = shown_and_imported(name, "--help")
    assert f"python -m loopax {name}" in shown
    assert {module for module in found if module.partition(".")[0] in PEERS} == set()
    assert "loopax._src.public" not in found  # which takes as long as JAX: what is public is imported when it is used


ROWS = [["jax", "0.10", "ok"], ["numpy", "12", "FAILS: no"]]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    show_table("Versions", ["name", "number", ""], ROWS, numeric=["number"])
    return stream.getvalue()


def test_plain_text(monkeypatch):
    lines = shown(io.StringIO(), monkeypatch).split("\n")
    assert lines[0] == "Versions"
    assert lines[2:6] == [
        "name   number",
        "-----  ------  ---------",
        "jax      0.10  ok",
        "numpy      12  FAILS: no",
    ]


def test_rich_on_a_terminal_that_has_it(monkeypatch):
    text = shown(Terminal(), monkeypatch)
    assert "┏━━━" in text
    assert "│ numpy │" in text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "-----  ------" in shown(Terminal(), monkeypatch)


@pytest.mark.parametrize("arguments", [[], ["cure"]])
def test_no_such_subcommand(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "doctor,calibrate,demo" in capsys.readouterr().err


def test_bench_says_where_it_has_gone(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--device", "gpu"])
    assert ended.value.code == 2
    assert "`python -m benchmarks --short`" in capsys.readouterr().err


@pytest.mark.slow
def test_demo(capsys, caplog):
    with precision_of_a_user(), jax.log_compiles(True):
        assert main(["demo"]) == 0
    compiled = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling ")]
    assert len(compiled) <= 8  # which is most of its time
    shown = capsys.readouterr()
    assert "fitted 0.00400, true 0.00400" in shown.out
    by_grad, by_difference = map(float, re.findall(r"(-[\d.]+) m, say", shown.out))
    assert by_grad == pytest.approx(by_difference, rel=1e-4)
    assert "64 lanes" in shown.out
    assert float(re.findall(r"worst miss is ([\d.]+) cm", shown.out)[0]) <= 100 * volley.CLOSE + 0.5
    assert f"fit: {volley.DESCENTS} steps" in shown.err


def test_a_shot_in_python():
    """Step by step, as the loop says; without air it is a parabola."""
    shot, steps = volley.fly(volley.DRAG, (0.0, 0.0, 20.0 * np.cos(0.7), 20.0 * np.sin(0.7))), 0
    while shot[1] > 0 or shot[3] > 0:
        shot, steps = volley.fly(volley.DRAG, shot), steps + 1
    x, y, right, up = shot
    distance, info = jax.jit(volley.shoot)(volley.DRAG, 0.7, 20.0)
    assert distance == pytest.approx(float(x - y * right / up))
    assert info.num_steps == steps
    assert volley.shoot(0.0, 0.7, 20.0)[0] == pytest.approx(20.0**2 * np.sin(1.4) / volley.GRAVITY, rel=1e-2)


START = jnp.linspace(0.1, 0.9, 64)


@pytest.fixture(autouse=True)
def _constants_of_loopax():
    yield
    lx.configure(calibration=None)


@pytest.fixture
def small_probes(monkeypatch):
    """Programs of a few operations, measured once."""
    few = [probes.Probe((name,), 2.0, jnp.sin, (START,), 1e3) for name in Costs._fields]
    monkeypatch.setattr(probes, "probes", lambda: few)
    monkeypatch.setattr(probes, "ROUNDS", 1)


def written(tmp_path, **changes):
    path = tmp_path / "costs.json"
    configuration.write(path, Costs()._replace(**changes), "a machine")
    return path


def energy(h):
    """Many functions of a state, of which residuals are stored or not."""
    return lx.fori_loop(0, 50, lambda _, h: jnp.tanh(h) * jnp.exp(-h * h) + 0.1 * h, h).sum()


def stored():
    """What `Auto` takes, and stores."""
    found = lx.explain(energy, START).loops[0].stored
    assert found is not None
    return found


def test_every_constant_has_one_probe_that_scales_it():
    names = [name for probe in probes.probes() for name in probe.constants]
    assert sorted(names) == sorted(Costs._fields)
    found = [(probe, 2 * probe.reference) for probe in probes.probes()]
    assert probes.scaled(found) == pytest.approx([2 * value for value in Costs()])


@pytest.mark.slow  # the probes themselves: some seconds
def test_probes_measure_this_machine():
    assert all(0 < nanoseconds < 1e6 for _, nanoseconds in probes.measured())


@pytest.mark.usefixtures("small_probes")
def test_command_writes_a_file(tmp_path, capsys):
    path = tmp_path / "costs.json"
    assert main(["calibrate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert all(
        name in printed for name in (*Costs._fields, str(path), "lx.configure(calibration=...)", "LOOPAX_CALIBRATION")
    )
    lx.configure(calibration=path)
    assert costs() != Costs()
    assert all(value > 0 for value in costs())
    lx.configure(calibration=None)
    assert costs() == Costs()
    assert main(["calibrate", str(tmp_path / "nowhere" / "costs.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_choices_follow_the_calibration(tmp_path):
    names = []
    for changes in ({"function": 1e3}, {"near_byte": 1e3}, {"function": 1e3}):
        lx.configure(calibration=written(tmp_path, **changes))
        names.append(stored().kind)
    assert names == ["Residuals()", "Checkpointed()", "Residuals()"]


def test_choices_follow_the_device(monkeypatch):
    """Unless a calibration is set: `jax.default_device`, else the default backend. A GPU counts as an H100."""
    assert settings.calibration() == CALIBRATIONS["cpu"]
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert settings.calibration() == CALIBRATIONS["tpu-v5e"]
    for device in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(device):
            assert settings.calibration() == CALIBRATIONS["cpu"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert settings.calibration() == CALIBRATIONS["h100"]
    with lx.configure(calibration="tpu-v5e"):
        assert settings.calibration() == CALIBRATIONS["tpu-v5e"]


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_results_do_not_depend_on_the_calibration(name):
    x, n = jnp.linspace(0.1, 0.9, 40), jnp.arange(40, dtype=jnp.int32)
    lane = lambda x, n: lx.fori_loop(0, n, lambda _, x: jnp.sin(x), x, max_steps=40, lanes="auto")
    loss = jax.value_and_grad(lambda x: jax.vmap(lane)(x, n).sum())
    expected = loss(x)
    with lx.configure(calibration=name):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), loss(x), expected)


def test_compiled_programs_are_traced_once_for_each_setting(tmp_path):
    traced = []

    @jax.jit
    def program(h):
        traced.append(1)
        return h + 1

    for file in (None, written(tmp_path, call=7.0), None):
        lx.configure(calibration=file)
        program(START)
    assert len(traced) == 2


def test_memory_is_that_of_the_program_or_of_the_block():
    whole = stored()
    with lx.configure(memory=8 * START.nbytes):
        fewer = stored()
        with lx.configure(calibration=None):
            assert stored() == fewer
    assert stored() == whole
    assert whole.carries > 8 >= fewer.carries
    lx.configure(memory=8 * START.nbytes)
    try:
        assert stored() == fewer
    finally:
        lx.configure(memory=DEFAULT_MEMORY)


def test_a_program_that_was_traced_before_follows_the_settings():
    program = jaxpr_as_fun(jax.make_jaxpr(energy)(START))
    gradient = lambda: str(jax.make_jaxpr(jax.grad(lambda h: program(h)[0]))(START))
    before = gradient()
    with lx.configure(memory=8 * START.nbytes):
        assert gradient() != before
    assert gradient() == before


def test_memory_that_is_none():
    memory: Any
    for memory, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"configure\(memory=...\)"):
            lx.configure(memory=memory)
    assert stored().carries > 8


def broken(product):
    return json.dumps({"platform": "cpu", "nanoseconds": Costs()._asdict() | {"product": product}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "is not a calibration: it holds no nanoseconds"),
        ('{"nanoseconds": 3}', "is not a calibration: it holds no nanoseconds"),
        ('{"nanoseconds": {"product": 1}}', "holds no nanoseconds of operations on a platform"),
        ('{"platform": "npu", "nanoseconds": {}}', "holds no nanoseconds of operations on a platform"),
        (
            '{"platform": "cpu", "nanoseconds": {"product": 1}}',
            r"of other operations. Got \['product'\], expected \['cached_byte'",
        ),
        *((broken(x), f"Got {{'product': {x!r}}}, expected positive numbers") for x in (-1.0, "1", float("inf"))),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as found:
        lx.configure(calibration=path)
    assert str(path) in str(found.value)
    assert "python -m loopax calibrate FILE" in str(found.value)
    assert costs() == Costs()


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "default", settings.default)
    monkeypatch.setenv("LOOPAX_CALIBRATION", str(written(tmp_path, call=7.0)))
    configuration.use_environment()
    assert settings.default.calibration is not None
    assert settings.default.calibration.costs.call == 7.0
    monkeypatch.setenv("LOOPAX_CALIBRATION", str(tmp_path / "other.json"))
    with pytest.raises(FileNotFoundError) as found:
        configuration.use_environment()
    assert "h100" in found.value.__notes__[0]
    assert "LOOPAX_CALIBRATION" in found.value.__notes__[1]
    monkeypatch.setenv("LOOPAX_CALIBRATION", "tpu-v5e")
    configuration.use_environment()
    assert settings.default.calibration == CALIBRATIONS["tpu-v5e"]


@pytest.mark.slow  # a process of its own
def test_the_first_program_is_compiled_once():
    program = """
import jax, loopax as lx
f = jax.jit(lambda x: lx.fori_loop(0, 3, lambda i, x: 2 * x, x))  # loopax is imported when it is traced
f(1.0), f(1.0)
print(f._cache_size())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"


@pytest.mark.slow  # a process of its own
def test_environment_is_read_with_the_first_name(tmp_path):
    program = "import loopax as lx; lx.scan; from loopax._src.settings import costs; print(costs().call)"
    environment = {"LOOPAX_CALIBRATION": str(written(tmp_path, call=7.0)), "PATH": ""}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "7.0"
