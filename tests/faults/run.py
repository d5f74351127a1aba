"""Seeded faults: does the suite notice small wrong edits of the core?

    python -m tests.faults.run [--slow] [name of a fault ...]

Each patch beside this file is one fault: a mask inverted, a slot off by one, a cotangent dropped. It is applied to a
copy of the project, and the tests run there until one fails: first those in the folder of the changed file, then those
around it, then all of `make test`, and with `--slow` those of `make test-slow`. A fault that no test notices is
printed. The command fails where `make test` leaves more than two unnoticed, and where a test fails without a fault.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from threading import Timer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTEST = ("-m", "pytest", "-v", "-n", "3", "--dist", "worksteal", "-p", "no:cacheprovider")
FAILED = re.compile(r"(FAILED|ERROR) (?P<test>(tests|loopax)/\S+)")  # as workers report it
MOST_SECONDS = 1800
IGNORED = ("--ignore", "tests/project/test_faults.py")  # which holds that the fault can be applied: here it has been


def faults() -> dict[str, Path]:
    """The patches by their names."""
    return {path.stem: path for path in sorted(HERE.glob("*.patch"))}


def changed_file(patch: Path) -> Path:
    """The file of loopax that a patch changes, from the root of the project."""
    line = next(line for line in patch.read_text().splitlines() if line.startswith("+++ b/"))
    return Path(line.removeprefix("+++ b/"))


def folders_of_tests(patch: Path) -> list[Path]:
    """The folder of tests that has the name of the changed file's folder, those that hold it, and all tests."""
    folder = Path("tests") / changed_file(patch).parent.relative_to("loopax/_src")
    return [path for path in (folder, *folder.parents) if path != Path() and (ROOT / path).is_dir()]


def copied_project(to: Path) -> None:
    """Copy all files that git knows."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)


def is_noticed(project: Path, *arguments: str) -> str:
    """The first test that fails, or that tests do not end; empty where all pass.

    Tests in other workers may never end then, for a fault can keep a loop from stopping: all are killed.
    """
    environment = os.environ | {"PYTHONPATH": str(project)}
    command = [sys.executable, *PYTEST, *IGNORED, *arguments]
    process = subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    kill = partial(os.killpg, process.pid, signal.SIGKILL)
    timer = Timer(MOST_SECONDS, kill)
    timer.start()
    assert process.stdout is not None
    failed = next(filter(None, map(FAILED.search, process.stdout)), None)
    timer.cancel()
    if failed:
        kill()
    returncode = process.wait()
    return failed["test"] if failed else f"pytest ended with {returncode}" if returncode else ""


def fails_without_a_fault() -> str:
    """The first test that fails in a copy without a fault: it would notice every one."""
    with tempfile.TemporaryDirectory() as folder:
        copied_project(Path(folder))
        return is_noticed(Path(folder), "-m", "not slow")


def noticed_by(patch: Path, with_slow: bool) -> str:
    """Which part of the suite notices a fault, and the first test; empty where none does."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        copied_project(project)
        subprocess.run(["git", "apply", "--unsafe-paths", str(patch)], cwd=project, check=True)
        for folder in folders_of_tests(patch):
            if failed := is_noticed(project, str(folder), "-m", "not slow"):
                return f"make test: {failed}"
        if with_slow and (failed := is_noticed(project, "-m", "slow")):
            return f"make test-slow: {failed}"
    return ""


def main() -> None:
    """Run the faults that are named, or all; fails where `make test` leaves more than two unnoticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults, without .patch; all unless given")
    parser.add_argument("--slow", action="store_true", help="also run the slow tests, on what the others do not notice")
    chosen = parser.parse_args()
    if failed := fails_without_a_fault():
        sys.exit(f"without a fault: {failed}")
    missed = 0
    for name, patch in faults().items():
        if chosen.names and name not in chosen.names:
            continue
        found = noticed_by(patch, chosen.slow)
        missed += not found.startswith("make test:")
        print(f"{name}: {found or 'NOT NOTICED'}", flush=True)
    sys.exit(missed > 2)


if __name__ == "__main__":
    main()
