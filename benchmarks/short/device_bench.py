"""`python -m benchmarks --device`: a page of numbers of a device, in one command.

Each table runs in a process of its own. This process never asks JAX for a device, so that the memory of a GPU is free.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.short import device, device_jobs, device_page
from benchmarks.short import device_page as device_report
from benchmarks.short.device import ALL, Seen
from benchmarks.short.device_jobs import Job, JobFailedError
from benchmarks.short.measure import MINUTES
from loopax._command.table import show_table


def run(arguments: argparse.Namespace) -> int:
    """Measure and write; the exit code is 2 where nothing can be measured, 1 where a table fails or is interrupted."""
    platform, sizes = arguments.device, "quick" if arguments.quick else "device"
    jobs = device_jobs.jobs(platform, sizes, arguments.only or "")
    if not jobs:
        print(f"No table has {arguments.only!r} in its title: --list prints the titles.", file=sys.stderr)
        return 2
    if arguments.list:
        _list(platform, jobs)
        return 0
    seen = device.look(platform)
    problem = device.problem(platform, seen)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    run_of_jobs = Run(seen, sizes, arguments.to or _folder(sizes), arguments.minutes or MINUTES)
    try:
        run_of_jobs.all(jobs)
    except KeyboardInterrupt:
        print(f"\nInterrupted. What was measured is in {run_of_jobs.path.with_suffix('.md')}.", file=sys.stderr)
        return 1
    return int(run_of_jobs.has_failed)


def _folder(sizes: str) -> Path:
    """Return where results are written: benchmarks/ in a clone, else the current folder; what is tiny is not kept."""
    clone = device_jobs.clone()
    if sizes != "device":
        return Path(tempfile.gettempdir())
    return clone / "benchmarks" if clone else Path()


def _list(platform: str, jobs: Sequence[Job]) -> None:
    """Print the flags, and the tables with the flags that each is measured with."""
    flags = [[flags.name, " ".join(flags.xla) or "XLA_FLAGS as it is"] for flags in ALL if platform in flags.platforms]
    show_table("Flags", ["name", "XLA_FLAGS"], flags)
    by_title: dict[str, list[Job]] = {}
    for job in jobs:
        by_title.setdefault(job.title, []).append(job)
    rows = [[title, "; ".join(job.flags.name for job in of_one)] for title, of_one in by_title.items()]
    show_table("Tables", ["title", "flags"], rows)
    print(f"{_in_words(sum(job.seconds for job in jobs))}, as is expected of a GPU. {_rest()}")


def _rest() -> str:
    """Return where more tables are."""
    if device_jobs.clone():
        return "All other tables are measured by `python -m benchmarks`, which takes longer."
    return "A clone of the repository has more tables: there, this command measures some, `python -m benchmarks` all."


class Run:
    """One run: a report that grows, and the time that it takes."""

    def __init__(self, seen: Seen, sizes: str, folder: Path, minutes: float) -> None:
        """Begin with what the file has of the same device and versions."""
        self.platform, self.minutes, self.begun = seen.platform, minutes, time.perf_counter()
        self.path = folder / f"{device_report.stem(seen, sizes)}.json"
        self.report = device_report.continued(device_report.empty(seen, sizes), self.path)
        self.has_failed = False
        versions = ", ".join(f"{name} {version}" for name, version in seen.versions.items())
        print(f"{seen.devices}, {seen.runtime}; {seen.processor}\n{versions}\n", flush=True)

    def all(self, jobs: Sequence[Job]) -> None:
        """Run the jobs one after the other, as long as there is time, and write the report after each."""
        for i, job in enumerate(jobs):
            spent = time.perf_counter() - self.begun
            if spent > 60 * self.minutes:
                self._leave_out(jobs[i:])
                break
            print(f"[{i + 1}/{len(jobs)}] {job.title}, flags: {job.flags.name}. {_left(jobs, i, spent)}", flush=True)
            self._one(job)
        print(f"Wrote {self.path.with_suffix('.md')} and {self.path.name}. {_rest()}")

    def _one(self, job: Job) -> None:
        start = time.perf_counter()
        try:
            record = device_jobs.measured(job, self.platform)
        except JobFailedError as error:
            print(f"Failed, and left out: {error}\n", flush=True)
            self.has_failed = True
            self._fail(job, str(error))
            return
        record |= {"seconds": round(time.perf_counter() - start, 1)}
        headers, rows = device_page.columns(record)
        show_table(record["about"], headers, rows, numeric=device_page.NUMBERS)
        self._save(device_report.with_record(self.report, record))

    def _leave_out(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if not device_report.has(self.report, job.title, job.flags.name):
                self._fail(job, f"not begun after {self.minutes:g} minutes")
        names = "\n".join(f"  {job.title}, flags: {job.flags.name}" for job in jobs)
        print(f"{self.minutes:g} minutes are over (--minutes changes that). Not measured, of {len(jobs)}:\n{names}")

    def _fail(self, job: Job, why: str) -> None:
        failure = {"title": job.title, "flags": job.flags.name, "why": why}
        self._save(device_report.with_failure(self.report, failure))

    def _save(self, report: device_report.Report) -> None:
        self.report = report
        device_report.write(report, self.path, device_page.page(report))


def _left(jobs: Sequence[Job], i: int, spent: float) -> str:
    """Return the time that is left: as expected, corrected by how long it has taken up to now."""
    expected = [job.seconds for job in jobs]
    factor = spent / sum(expected[:i]) if i else 1.0
    return f"{_in_words(factor * sum(expected[i:]))} left."


def _in_words(seconds: float) -> str:
    return f"About {seconds:.0f} s" if seconds < 90 else f"About {seconds / 60:.0f} minutes"
