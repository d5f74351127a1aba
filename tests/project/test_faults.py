"""The seeded faults of `make faults` are edits of the code as it is."""

import subprocess
from pathlib import Path

import pytest

from tests.faults.run import ROOT, changed_file, faults, folders_of_tests


def test_there_are_forty() -> None:
    assert len(faults()) >= 40


@pytest.mark.parametrize("name", faults())
def test_a_fault_can_be_applied(name: str) -> None:
    patch = faults()[name]
    assert (ROOT / changed_file(patch)).exists()
    assert folders_of_tests(patch)[-1] == Path("tests")
    done = subprocess.run(
        ["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
