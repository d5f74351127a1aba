"""Which device JAX takes, and what is said where there is no GPU."""

import pytest

from benchmarks.short import device
from benchmarks.short.device import Seen
from benchmarks.short.options import main

CPU = Seen("cpu", "8 x cpu", "A Processor", "A Processor (2 logical cores)", "cpu", "", {"jax": "1", "jaxlib": "2"})
GPU = CPU._replace(platform="gpu", devices="2 x NVIDIA H100", kind="NVIDIA H100", runtime="cuda 12090", driver="570.1")


def test_what_a_process_sees():
    seen = device.look("cpu")
    assert (seen.platform, seen.devices, seen.says) == ("cpu", "8 x cpu", "")  # as many as these tests ask for
    assert seen.processor.startswith(seen.kind)
    assert {"loopax", "jax", "jaxlib", "equinox"} <= set(seen.versions)


def test_a_process_that_finds_no_device_says_why(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "banana")
    seen = device.look("gpu")
    assert seen.platform == ""
    assert "banana" in seen.says
    assert "JAX sees: no device" in device.problem("gpu", seen)


def test_a_device_of_the_platform_is_no_problem():
    assert device.problem("gpu", GPU) == ""
    assert device.problem("cpu", CPU) == ""


def test_without_a_gpu_it_says_what_is_there_and_what_to_do(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(device, "_nvidia_smi", lambda _: "NVIDIA H100, 570.1")
    said = device.problem("gpu", CPU)
    for words in (
        "platform 'gpu', which was asked for",
        "JAX sees: 8 x cpu (platform cpu)",
        "versions: jax 1, jaxlib 2",
        "nvidia-smi: NVIDIA H100, 570.1",
        "JAX_PLATFORMS: cpu",
        'pip install "jax[cuda13]"',
        '"jax[cuda12]"',
        "python -m benchmarks --device cpu",
    ):
        assert words in said


def test_plugins_are_found_by_their_names(monkeypatch):
    class Package:
        version = "0.10.2"

        def __init__(self, name):
            self.metadata = {"Name": name}

    names = ["jax", "jax-cuda12-plugin", "jax_rocm7_pjrt", "jax-tqdm"]
    monkeypatch.setattr(device.metadata, "distributions", lambda: map(Package, names))
    assert device.plugins() == ["jax-cuda12-plugin 0.10.2", "jax_rocm7_pjrt 0.10.2"]


def test_the_command_ends_with_2_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(device, "look", lambda _: CPU)
    assert main(["--device", "gpu", "--to", str(tmp_path)]) == 2
    assert "JAX sees: 8 x cpu" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["570.1\n570.1\n", ""])
def test_the_driver_is_that_of_the_first_gpu(monkeypatch, output):
    monkeypatch.setattr(device.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(device.subprocess, "run", lambda *_, **__: device.subprocess.CompletedProcess([], 0, output))
    assert device.driver() == output[:5]
