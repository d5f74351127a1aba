"""Type checkers accept a user's program and find a user's mistakes, strictly, with the package seen from outside."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISTAKES = (HERE / "user_mistakes.py").read_text().splitlines()
CHECKERS = {
    "mypy": ["mypy", "--strict", "--python-executable", sys.executable, "--no-error-summary"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


def errors(checker: str, folder: Path) -> set[tuple[str, int]]:
    """The lines in which a checker finds an error, in copies of both files outside of the repository."""
    pytest.importorskip(checker, reason="checkers of types are in the environment of `make test` alone")
    files = ["user_program.py", "user_mistakes.py"]
    for file in files:
        shutil.copy(HERE / file, folder)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    found = subprocess.run(
        [sys.executable, "-m", *CHECKERS[checker], *files], cwd=folder, capture_output=True, text=True, check=False
    )
    assert found.returncode in (0, 1), found.stderr
    return {(path, int(line)) for path, line in re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error", found.stdout)}


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.slow), "pyright"])
def test_a_typed_program_is_accepted_and_mistakes_are_found(checker: str, tmp_path: Path) -> None:
    """All of them, and no other line has an error."""
    marked = {("user_mistakes.py", n) for n, line in enumerate(MISTAKES, 1) if "# MISTAKE" in line}
    assert len(marked) == 11
    assert errors(checker, tmp_path) == marked
