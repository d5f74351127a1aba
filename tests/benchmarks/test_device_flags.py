"""The flags of XLA that are compared: XLA takes them, and those of the user stay."""

import subprocess
import sys

import pytest

from benchmarks.short.device import ALL, DEFAULT, LOOPS_AS_GRAPHS, environment, flags_of_user


def test_flags_of_the_user_stay_but_for_those_that_are_compared(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one=1 --xla_gpu_enable_command_buffer=FUSION --two")
    assert flags_of_user() == ["--one=1", "--two"]
    assert environment(DEFAULT, "gpu")["XLA_FLAGS"] == "--one=1 --two"
    found = environment(LOOPS_AS_GRAPHS, "gpu")["XLA_FLAGS"]
    assert found == "--one=1 --two --xla_gpu_enable_command_buffer=+WHILE"


def test_a_cpu_is_asked_for_by_name_and_a_gpu_is_what_jax_takes(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert environment(DEFAULT, "cpu")["JAX_PLATFORMS"] == "cpu"
    assert "JAX_PLATFORMS" not in environment(DEFAULT, "gpu")


def test_names_are_of_one_set_each():
    assert len({flags.name for flags in ALL}) == len(ALL)


@pytest.mark.parametrize("value", ["+WHILE", "+BANANA"])
def test_xla_takes_these_flags_and_refuses_others(monkeypatch, value):
    """XLA reads flags for GPUs also where there is none."""
    assert "--xla_gpu_enable_command_buffer=+WHILE" in ALL[-1].xla
    variables = environment(ALL[-1], "cpu")
    variables["XLA_FLAGS"] = variables["XLA_FLAGS"].replace("+WHILE", value)
    command = [sys.executable, "-c", "import jax; jax.devices(); jax.jit(abs).lower(1.0).compile()"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (value == "+WHILE"), done.stderr[-500:]
