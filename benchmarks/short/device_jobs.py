"""What `bench --device` runs: each table with each of its sets of flags, as a command that prints a record.

The tables of the package come first. In a clone of the repository, tables of the larger benchmark follow, which
`benchmarks/on_device.py` names.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import loopax
from benchmarks.short.device import ALL, DEFAULT, Flags, environment
from benchmarks.short.device_worker import TABLES

MOST_SECONDS = 240  # for one table
_CLONE = Path(loopax.__file__).parents[1]
_WORKER, _OF_CLONE = "benchmarks.short.device_worker", "benchmarks.on_device"


class Job(NamedTuple):
    """A table with a set of flags."""

    title: str
    flags: Flags
    seconds: float  # expected
    command: tuple[str, ...]  # what Python runs
    folder: Path | None = None  # where; None: here


class JobFailedError(Exception):
    """A table that could not be measured."""


def jobs(platform: str, sizes: str, part: str = "") -> list[Job]:
    """Return the jobs for a platform, in order, whose titles contain `part`."""
    found = [*_of_package(platform, sizes), *(_of_clone() if sizes == "device" and clone() else [])]
    return [job for job in found if part in job.title]


def clone() -> Path | None:
    """Return the folder of the repository; None where loopax was installed without it."""
    return _CLONE if (_CLONE / "benchmarks" / "on_device.py").is_file() else None


def measured(job: Job, platform: str) -> dict[str, Any]:
    """Run a job, and return its record."""
    variables = environment(job.flags, platform)
    command = [sys.executable, *job.command]
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": variables, "cwd": job.folder}
    try:
        done = subprocess.run(command, timeout=MOST_SECONDS, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise JobFailedError(f"it took longer than {MOST_SECONDS} s") from error
    if done.returncode:
        raise JobFailedError(f"exit code {done.returncode}: {_last_lines(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1]) | {"flags": job.flags.name}


def _of_package(platform: str, sizes: str) -> Iterable[Job]:
    """Yield all tables with the flags of XLA as they are, then those that other flags may change."""
    for flags in ALL:
        for table in TABLES:
            if flags in table.flags and platform in flags.platforms:
                yield Job(table.title, flags, table.seconds, ("-m", _WORKER, table.title, sizes))


def _of_clone() -> list[Job]:
    command = [sys.executable, "-m", _OF_CLONE, "--list"]
    done = subprocess.run(command, cwd=_CLONE, capture_output=True, text=True, check=True)
    tables = json.loads(done.stdout)
    return [Job(title, DEFAULT, seconds, ("-m", _OF_CLONE, title), _CLONE) for title, seconds in tables]


def _last_lines(text: str) -> str:
    return " ".join(line.strip() for line in text.strip().splitlines()[-3:])[-400:]
