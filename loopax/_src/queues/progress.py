"""How far a stream is, as it is shown: items, and the steps of lanes."""

import time
from collections.abc import Callable, Sized
from typing import Any

from loopax._src.progress import Reporter, to_progress
from loopax._src.queues.working_lanes import WorkingLanes


class Shown:
    """What is shown of a stream, if anything is. Items are counted from where this process began."""

    def __init__(self, name: str, progress: Any, f: Callable[[Any], Any], items: Any, more: int = 0) -> None:
        """Nothing is drawn yet. There are so many more than `items`."""
        asked = to_progress(name, progress)
        self._reporter = None if asked is None else Reporter.of(asked, name, f, "item")
        self._total = len(items) + more if isinstance(items, Sized) else None
        self._run: int | None = None
        self._reported = 0.0

    def begin(self, before: int = 0) -> None:
        """The first item is about to begin, after so many that were finished before."""
        if self._reporter is not None and self._run is None:
            total = -1 if self._total is None else max(self._total - before, 0)
            self._run, _ = self._reporter.begin(total, 1, 0, 0, before)

    def update(self, lanes: WorkingLanes) -> None:
        """Some time has passed."""
        reporter, now = self._reporter, time.monotonic()
        if reporter is not None and self._run is not None and now - self._reported >= reporter.progress.every:
            self._reported = now
            report = lanes.report()
            reporter.report(self._run, report.items, lanes.num_busy, report.useful)

    def end(self, lanes: WorkingLanes, finished: bool) -> None:
        """No more is done; whether all items are finished."""
        if self._reporter is None or self._run is None:
            return
        run, self._run = self._run, None
        report = lanes.report()
        self._reporter.report(run, report.items, lanes.num_busy, report.useful)
        if finished:
            self._reporter.end(run, report.items)
        else:
            self._reporter.close()
