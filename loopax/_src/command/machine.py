"""The machine in words."""

import os
import platform
from pathlib import Path

import jax


def machine() -> str:
    """Its processor, and the accelerators where there are some."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return processor()
    return f"{len(devices)} x {devices[0].device_kind}, {processor()}"


def processor() -> str:
    """Return the processor in words."""
    info, model = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model} ({os.cpu_count()} logical cores)"
