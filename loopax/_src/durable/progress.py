"""How far a durable loop is, as other loops show it: one bar for all chunks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loopax._src.progress import Reporter


@contextmanager
def shown(reporter: Reporter | None, steps: int, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a run that goes on after so many steps; gives a function that is told the steps that have been taken.

    What is shown is counted from there, so that the rate is that of this process.
    """
    if reporter is None:
        yield lambda _: None
        return
    run, _ = reporter.begin(-1 if total is None else total - steps, 1, 0, 0, before=steps)
    taken, reported = 0, time.monotonic()

    def show(now: int) -> None:
        nonlocal taken, reported
        taken = now - steps
        if time.monotonic() - reported >= reporter.progress.every:
            reported = time.monotonic()
            reporter.report(run, taken, -1)

    try:
        yield show
    except BaseException:
        reporter.report(run, taken, -1)
        reporter.close()
        raise
    reporter.end(run, taken)
