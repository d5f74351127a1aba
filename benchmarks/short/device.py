"""Which device JAX takes, found in a process that ends at once: a process that has seen a GPU keeps most of its memory.

`python -m benchmarks.short.device` is that process.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from typing import NamedTuple

import jax

from loopax._command.installed import processor
from loopax._command.table import in_words
from loopax._src.extras import is_installed
from loopax._version import __version__

# The flags of XLA that `bench --device` compares. XLA reads them once, so each set of flags has processes of its own.
#
# On a GPU the host starts each operation of a step, and waits for the condition of each step. With `WHILE` in
# `xla_gpu_enable_command_buffer`, XLA records a whole loop as a graph, which the GPU runs without the host. A `+`
# adds to the types that are recorded anyway. XLA records no graph of fewer than five operations, and a small body has
# fewer, so that the third set lowers this limit.
#
# XLA of jaxlib 0.10.0, 0.10.2 and 0.12.0 accepts these flags. Where it does not know one, it ends the process, and
# the table is reported as failed.


class Flags(NamedTuple):
    """A set of flags, and the platforms on which it changes anything."""

    name: str
    xla: tuple[str, ...]
    platforms: tuple[str, ...] = ("gpu",)


DEFAULT = Flags("default", (), ("cpu", "gpu"))
LOOPS_AS_GRAPHS = Flags("+WHILE", ("--xla_gpu_enable_command_buffer=+WHILE",))
SMALL_LOOPS_AS_GRAPHS = Flags("+WHILE, any size", (*LOOPS_AS_GRAPHS.xla, "--xla_gpu_graph_min_graph_size=1"))
ALL = (DEFAULT, LOOPS_AS_GRAPHS, SMALL_LOOPS_AS_GRAPHS)


def environment(flags: Flags, platform: str) -> dict[str, str]:
    """Return the environment of a process that runs with these flags, on a device of this platform."""
    variables = {**os.environ, "XLA_FLAGS": " ".join([*flags_of_user(), *flags.xla])}
    return variables | ({"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {})


def flags_of_user() -> list[str]:
    """Return the flags in XLA_FLAGS, without those that the sets compare: the default is that of XLA."""
    compared = {_name(flag) for flags in ALL for flag in flags.xla}
    return [flag for flag in os.environ.get("XLA_FLAGS", "").split() if _name(flag) not in compared]


def _name(flag: str) -> str:
    return flag.partition("=")[0]


PACKAGES = ("jax", "jaxlib", "equinox", "flax", "diffrax")
VARIABLES = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")  # which hide GPUs, or the libraries for them
_PLUGIN = re.compile(r"jax[-_](cuda|rocm)\d+[-_](plugin|pjrt)")
MOST_SECONDS = 120


class Seen(NamedTuple):
    """What a process of JAX sees."""

    platform: str  # "cpu" or "gpu"; empty where JAX finds no device at all
    devices: str  # in words, as "1 x NVIDIA H100 80GB HBM3"
    kind: str  # what a file is named after
    processor: str
    runtime: str  # the platform's version as JAX says it, as "PJRT C API cuda 12090"
    driver: str  # as nvidia-smi says it
    versions: dict[str, str]
    says: str = ""  # the error of JAX where it finds no device


def look(platform: str) -> Seen:
    """Return what a process sees that is meant to run on this platform."""
    command = [sys.executable, "-m", "benchmarks.short.device"]
    variables = environment(DEFAULT, platform)
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=True, env=variables)
    return Seen(**json.loads(done.stdout.splitlines()[-1]))


def seen_here() -> Seen:
    """Return what this process sees."""
    about = {"processor": processor(), "driver": driver(), "versions": versions()}
    try:
        devices = jax.devices()
    except Exception as error:  # noqa: BLE001 - some versions of JAX raise an AssertionError where there is none
        return Seen("", "", "", runtime="", says=in_words(error).rstrip(": "), **about)
    platform, first = jax.default_backend(), devices[0]
    kind = processor().partition(" (")[0] if platform == "cpu" else first.device_kind
    runtime = " ".join(first.client.platform_version.split())
    return Seen(platform, f"{len(devices)} x {first.device_kind}", kind, runtime=runtime, **about)


def versions() -> dict[str, str]:
    """Return the versions of loopax and of what may be measured beside it, as far as they are installed."""
    return {"loopax": __version__} | {name: metadata.version(name) for name in PACKAGES if is_installed(name)}


def driver() -> str:
    """Return the version of NVIDIA's driver; nothing where there is none."""
    return _nvidia_smi("driver_version")


def problem(platform: str, seen: Seen) -> str:
    """Return why nothing can be measured on this platform, and what to do; nothing where something can."""
    if seen.platform == platform:
        return ""
    facts = {
        "JAX sees": f"{seen.devices} (platform {seen.platform})" if seen.platform else "no device",
        "JAX says": seen.says,
        "versions": ", ".join(f"{name} {seen.versions[name]}" for name in ("jax", "jaxlib")),
        "plugins for GPUs": ", ".join(plugins()) or "none is installed",
        "nvidia-smi": _nvidia_smi("name,driver_version") or "not found, or it lists no GPU",
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    lines = [f"  {name}: {value}" for name, value in facts.items() if value]
    return "\n".join([f"No device of the platform {platform!r}, which was asked for.", *lines, *_advice()])


def plugins() -> list[str]:
    """Return the packages that let JAX use a GPU."""
    found = {(dist.metadata["Name"] or "", dist.version) for dist in metadata.distributions()}
    return sorted(f"{name} {version}" for name, version in found if _PLUGIN.fullmatch(name))


def _advice() -> list[str]:
    return [
        "What to do:",
        "  - If nvidia-smi lists no GPU, install NVIDIA's driver first, or ask for a machine with a GPU.",
        '  - Install JAX for GPUs: pip install "jax[cuda13]" (driver 580 or newer) or "jax[cuda12]" (525 or newer).',
        "  - Unset JAX_PLATFORMS and CUDA_VISIBLE_DEVICES if they hide the GPU.",
        "  - Measure the processor instead: python -m benchmarks --device cpu",
    ]


def _nvidia_smi(fields: str) -> str:
    """Return what nvidia-smi says of the first GPU; nothing where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=True)
    except subprocess.SubprocessError:
        return ""
    return next(iter(done.stdout.strip().splitlines()), "")


if __name__ == "__main__":
    print(json.dumps(seen_here()._asdict()))
