"""Runs that earlier versions of loopax have stored: they go on, or the error names the version that stored them."""

import tarfile
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.durable.cases import Steps, read_rows
from tests.durable.stored_programs import PROGRAMS
from tests.reference import assert_close

STORED = Path(__file__).parent / "stored"


def unpack(name: str, directory: Path) -> Path:
    """The stored runs of this name."""
    with tarfile.open(STORED / f"{name}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return directory / name


@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_stored_in_format_1(name: str, tmp_path: Any) -> None:
    steps = Steps()
    expected = PROGRAMS[name](tmp_path / "whole", Steps())
    result = PROGRAMS[name](unpack("format1", tmp_path) / name, steps)
    jax.effects_barrier()
    assert_close(read_rows(result), read_rows(expected))
    assert sorted(steps.taken) == [9, 10, 11]
