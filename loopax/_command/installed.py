"""Which versions are installed, and whether loopax is tested with them, by what its own package says."""

import os
import platform
import re
from importlib import metadata
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple

import jax

from loopax._version import __version__


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
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text(encoding="utf-8").splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    return f"{model} ({os.cpu_count()} logical cores)"


_REQUIREMENT = re.compile(r"([\w.\-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;.*?extra\s*==\s*['\"]([\w\-]+)['\"])?")


class Installed(NamedTuple):
    """A package that loopax needs, or can use."""

    name: str
    version: str | None  # None: it is not installed
    wanted: str  # a range, as ">=0.10.0", or nothing
    extra: str  # of loopax, that installs it; nothing where loopax always needs it

    @property
    def status(self) -> str:
        """In words: `ok`, or what to do."""
        if self.version is None:
            return f"not installed: pip install loopax[{self.extra}]" if self.extra else "FAILS: not installed"
        return "ok" if in_range(self.version, self.wanted) else "out of range"

    @property
    def fails(self) -> bool:
        """Whether loopax does not work with it, or may not."""
        return self.status.startswith(("FAILS", "out of range"))


def found() -> list[Installed]:
    """Python, loopax, and all that loopax names as a requirement, in its own order; jaxlib after jax."""
    try:
        python, required = metadata.metadata("loopax")["Requires-Python"] or "", metadata.requires("loopax") or []
    except metadata.PackageNotFoundError:  # a copy of the source that was never installed
        python, required = "", ["jax", "equinox", "jaxtyping", "numpy"]
    packages = [_parsed(requirement) for requirement in required]
    place = 1 + next((i for i, package in enumerate(packages) if package.name == "jax"), -1)
    packages.insert(place, _look_up("jaxlib", "", ""))
    return [
        Installed("Python", platform.python_version(), python, ""),
        Installed("loopax", __version__, "", ""),
        *packages,
    ]


def in_range(version: str, wanted: str) -> bool:
    """Whether a version is in a range such as `>=0.10.0,!=0.11.1,<2`, by the numbers of its release."""
    for part in filter(None, map(str.strip, wanted.split(","))):
        match = re.fullmatch(r"(>=|<|!=)\s*([\d.]+)", part)
        if match is None:
            raise ValueError(f"the range {part!r} of a requirement is neither >=, < nor != and a version")
        ours, limit = zip(*zip_longest(_release(version), _release(match[2]), fillvalue=0), strict=True)
        if not {">=": ours >= limit, "<": ours < limit, "!=": ours != limit}[match[1]]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """`0.12.8.dev1` is (0, 12, 8)."""
    return tuple(int(part) for part in takewhile(str.isdigit, re.split(r"[.+\-]|(?=[a-z])", version)))


def _parsed(requirement: str) -> Installed:
    match = _REQUIREMENT.match(requirement)
    assert match is not None, requirement
    name, wanted, extra = match.groups(default="")
    return _look_up(name, wanted.strip(), extra)


def _look_up(name: str, wanted: str, extra: str) -> Installed:
    try:
        return Installed(name, metadata.version(name), wanted, extra)
    except metadata.PackageNotFoundError:
        return Installed(name, None, wanted, extra)
