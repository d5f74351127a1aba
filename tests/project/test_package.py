"""What is packed and published with the code: the wheel, the citation, the versions of tools."""

import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import loopax

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_the_whole_package_and_says_that_it_is_typed(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "loopax/py.typed" in names
    assert names == {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "loopax").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_the_citation_is_of_this_version() -> None:
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [loopax.__version__]


def test_pre_commit_has_the_locked_ruff() -> None:
    (locked,) = re.findall(r"^ruff==(.*)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"ruff-pre-commit\n    rev: v(.*)$", hooks, re.MULTILINE) == [locked]


def test_hosted_tests_call_targets_that_are_there() -> None:
    """`make test-${{ matrix.name }}` is one for each other environment."""
    makefile, workflow = (ROOT / "Makefile").read_text(), (ROOT / ".github/workflows/tests.yml").read_text()
    others = set(re.findall(r"- \{?name: ([\w.]+)[,\n]", workflow))
    targets = {target for line in re.findall(r"run: (?:env .* )?make ([\w -]+\w)", workflow) for target in line.split()}
    assert others == {"lowest", "newest", "python3.13", "python3.14"}
    for target in targets | {f"test-{name}" for name in others}:
        assert re.search(rf"^(?:[\w.-]+ )*{re.escape(target)}(?: [\w.-]+)*:", makefile, re.MULTILINE), target
