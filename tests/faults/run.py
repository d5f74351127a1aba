"""Seeded faults: does the suite notice small wrong edits of the core?

    python -m tests.faults.run [--slow] [name of a fault ...]

Each patch beside this file is one fault: a mask inverted, a slot off by one, a cotangent dropped. It is applied to a
copy of the project. First the test runs there that noticed the fault the last time (`noticed.toml`). Where that passes,
tests run until one fails: those in the folder of the changed file, then those around it, then all of `make test`, and
with `--slow` those of `make test-slow`. The command writes `noticed.toml`, prints each fault that no test notices, and
fails where `make test` leaves more than two unnoticed, and where a test fails without a fault.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Timer
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOTICED = HERE / "noticed.toml"
PYTEST = ("-m", "pytest", "-v", "-p", "no:cacheprovider")
PARALLEL = ("-n", "3", "--dist", "worksteal")
# Lines of pytest and of its workers; in brackets, the name of a test may hold spaces.
TEST = r"(?P<test>(tests|loopax)/\S+?\.py(::[\w.]+)*(\[.*?\])?)"
FAILED = re.compile(rf"(FAILED|ERROR) {TEST}(?= - |\s*$)")
STARTED = re.compile(rf"{TEST} *$")
PASSED = re.compile(rf"(PASSED|SKIPPED|XFAIL) {TEST}\s*$")
MOST_SILENT_SECONDS = 150  # more than any one test takes
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
    folder = Path("tests", *(part.removeprefix("_") for part in changed_file(patch).parts[1:-1] if part != "_src"))
    return [path for path in (folder, *folder.parents) if path != Path() and (ROOT / path).is_dir()]


def copied_project(to: Path) -> None:
    """Copy all files that git knows."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)


@contextmanager
def project_with(patches: Iterable[Path]) -> Iterator[Path]:
    """A copy of the project with these faults."""
    with tempfile.TemporaryDirectory() as folder:
        copied_project(Path(folder))
        for patch in patches:
            subprocess.run(["git", "apply", "--unsafe-paths", str(patch)], cwd=folder, check=True)
        yield Path(folder)


class Noticed(NamedTuple):
    """What notices a fault."""

    test: str
    is_slow: bool
    commit: str  # where it did so the last time

    @property
    def is_there(self) -> bool:
        """Whether there still is such a test."""
        file, _, name = self.test.partition("::")
        return (ROOT / file).is_file() and f"def {name.split('[')[0]}(" in (ROOT / file).read_text()


def recorded() -> dict[str, Noticed]:
    """What noticed each fault the last time."""
    found = tomllib.loads(NOTICED.read_text()) if NOTICED.exists() else {}
    return {name: Noticed(**entry) for name, entry in found.items() if name in faults()}


def record(noticed: dict[str, Noticed]) -> None:
    """Write what noticed faults; of others, what did so before."""
    fields = lambda entry: ", ".join(f"{name} = {json.dumps(value)}" for name, value in entry._asdict().items())
    lines = [f"{name} = {{ {fields(entry)} }}\n" for name, entry in sorted((recorded() | noticed).items())]
    NOTICED.write_text("# Which test notices each fault: written by `make faults`.\n" + "".join(lines))


def commit() -> str:
    """The commit of this checkout."""
    git = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def is_noticed(project: Path, *arguments: str) -> str:
    """The first test that fails or does not end; empty where all pass.

    A fault can keep a loop from stopping: where nothing has passed for long, all workers are killed.
    """
    environment = os.environ | {"PYTHONPATH": str(project)}
    command = [sys.executable, *PYTEST, *IGNORED, *arguments]
    process = subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    kill = partial(os.killpg, process.pid, signal.SIGKILL)
    running: dict[str, None] = dict.fromkeys(argument for argument in arguments if "::" in argument)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    while (line := before_silence(lines, kill)) and not FAILED.search(line):
        if started := STARTED.match(line):
            running[started["test"]] = None
        elif passed := PASSED.search(line):
            running.pop(passed["test"], None)
    if line:
        kill()
    returncode = process.wait()
    if failed := FAILED.search(line):
        return failed["test"]
    hangs = returncode == -signal.SIGKILL and running
    return next(iter(running)) if hangs else f"pytest ended with {returncode}" if returncode else ""


def before_silence(lines: Iterator[str], kill: Callable[[], object]) -> str:
    """The next line; the empty line at the end, also where the workers were killed because none came."""
    timer = Timer(MOST_SILENT_SECONDS, kill)
    timer.start()
    line = next(lines, "")
    timer.cancel()
    return line


def noticed_again(name: str) -> bool:
    """Whether the test that noticed a fault the last time does so again."""
    with project_with([faults()[name]]) as project:
        return is_noticed(project, "-x", recorded()[name].test).startswith("tests/")


def noticed_by(patch: Path, with_slow: bool) -> Noticed | None:
    """What notices a fault first."""
    with project_with([patch]) as project:
        for folder in folders_of_tests(patch):
            if failed := is_noticed(project, *PARALLEL, str(folder), "-m", "not slow"):
                return Noticed(failed, False, commit())
        failed = is_noticed(project, *PARALLEL, "-m", "slow") if with_slow else ""
    return Noticed(failed, True, commit()) if failed else None


def fails_without_a_fault(tests: Sequence[str]) -> str:
    """The first of these tests that fails in a copy without a fault: it would notice every one."""
    with project_with([]) as project:
        return is_noticed(project, *tests)


def main() -> None:
    """Run the faults that are named, or all; fails where `make test` leaves more than two unnoticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults, without .patch; all unless given")
    parser.add_argument("--slow", action="store_true", help="also run the slow tests, on what the others do not notice")
    chosen = parser.parse_args()
    names = chosen.names or [*faults()]
    found = {name: entry for name, entry in recorded().items() if name in names and entry.is_there}
    tests = (
        sorted({entry.test for entry in found.values()}) if len(found) == len(names) else [*PARALLEL, "-m", "not slow"]
    )
    if failed := fails_without_a_fault(tests):
        sys.exit(f"without a fault: {failed}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        again = dict(zip(found, pool.map(noticed_again, found), strict=True))
    for name in names:
        new = found[name]._replace(commit=commit()) if again.get(name) else noticed_by(faults()[name], chosen.slow)
        found.pop(name, None)
        if new:
            found[name] = new
            record(found)
        print(f"{name}: {new.test if new else 'NOT NOTICED'}", flush=True)
    sys.exit(sum(name not in found or found[name].is_slow for name in names) > 2)


if __name__ == "__main__":
    main()
