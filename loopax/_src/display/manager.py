"""What running loops have reported: one display for each loop of the program, however often and wherever it runs.

Several runs of a loop may be under way at once, on devices of their own or because programs are dispatched ahead. They
share a display, which shows the one that is furthest behind. A run whose program died does not say so, and is left out
when it has not reported for a while; it comes back if it does report.
"""

import atexit
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.display.render import RARER, Drawing, Facts, drawing

GROWTH = 8  # so many times more steps, at most, from one report to the next
# After so many intervals without a report a run is left out where others report, and its display is closed. The longest
# time between two reports counts as the interval where steps take longer than that.
BEHIND, GONE = 3, 100


@dataclass
class Run:
    display: "Display"
    total: int | None
    size: int  # of its group of lanes
    began: float
    seen: float  # when it last reported, and went on
    stride: int = 1  # steps from that report to the next
    steps: int = 0
    active: int | None = None
    gap: float = 0.0  # the longest time between two reports
    inner: int | None = None


def next_stride(steps: int, seconds: float, every: float, last: int) -> int:
    """Steps until the next report, for one every so many seconds, where `steps` have taken `seconds`."""
    wanted = steps * every / seconds if seconds > 0 else float("inf")
    return int(max(1.0, min(wanted, GROWTH * last, MOST_STEPS)))


@dataclass
class Display:
    key: Hashable
    label: str
    every: float
    drawing: Drawing
    began: float
    drawn: float  # when it was last drawn
    parts: int = 1  # runs that are one loop
    lanes: int = 0  # in all of these, where they are groups
    runs: dict[int, Run] = field(default_factory=dict)
    ended: int = 0  # parts
    base: int = 0  # their steps
    touched: float = 0.0  # when a part last ended
    left: int = 0  # lanes that were in them
    unit: str = "step"  # what is counted, one of it
    before: int = 0  # steps that were taken in another process

    def live(self, now: float, intervals: float) -> list[Run]:
        """The runs that have reported within so many intervals."""
        return [run for run in self.runs.values() if now - run.seen <= intervals * max(self.every, run.gap)]

    def facts(self, now: float) -> Facts:
        """How far the run is that is furthest behind."""
        runs = self.live(now, BEHIND) or list(self.runs.values())
        run = min(runs, key=lambda run: run.steps) if runs else Run(self, None, 0, now, now)
        active = run.active
        if self.lanes and active is not None:
            active = max(self.lanes - self.left - sum(r.size - (r.active or 0) for r in runs), 0)
        total = run.total if self.parts == 1 else None
        return Facts(
            self.label, self.base + run.steps, total, now - self.began, active, self.unit, run.inner, self.before
        )


class Displays:
    """All displays, by what the loop is."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._open: dict[Hashable, Display] = {}
        self._runs: dict[int, Run] = {}
        self._left: dict[Hashable, float] = {}  # when the end of a loop was last drawn
        self._numbers = 0
        self._watcher: threading.Thread | None = None

    def begin(
        self,
        key: Hashable,
        label: str,
        every: float,
        style: str,
        *,
        total: int,
        parts: int,
        lanes: int,
        size: int,
        unit: str = "step",
        before: int = 0,
    ) -> int:
        """A run begins; returns its number."""
        with self._lock:
            now = self._now()
            display = self._open.get(key)
            if display is not None:
                between_parts = display.ended % display.parts and now - display.touched <= GONE * display.every
                if not between_parts and not display.live(now, BEHIND):  # this is not one more run beside others
                    self._close(key, finished=False)
                    display = None
            if display is None:
                bar_or_text = drawing(style, len(self._open))
                display = Display(key, label, every, bar_or_text, now, now, parts, lanes, unit=unit, before=before)
                self._open[key] = display
                self._watch()
            self._numbers = self._numbers % MOST_STEPS + 1
            run = Run(display, None if total < 0 else total, size, now, now)
            display.runs[self._numbers] = self._runs[self._numbers] = run
            return self._numbers

    def report(self, number: int, steps: int, active: int, inner: int | None = None) -> int:
        """A run has taken so many steps; returns how many more it takes until the next report.

        `inner`: what is counted is something else, and so many steps were taken for it.
        """
        with self._lock:
            now = self._now()
            run = self._runs.get(number)
            if run is None:  # it was closed, and is not dead after all
                return MOST_STEPS
            display, run.inner = self._reopen(number, run), inner
            taken, seconds = steps - run.steps, now - run.seen
            run.stride = next_stride(taken, seconds, display.every, run.stride)
            run.steps, run.active, run.gap = steps, None if active < 0 else active, max(run.gap, seconds)
            if now - display.drawn >= display.drawing.interval(display.every, now - display.began):
                display.drawing.draw(display.facts(now))
                display.drawn = now
            run.seen = self._now()  # what drawing takes is no time of the loop
            return run.stride

    def end(self, number: int, steps: int) -> None:
        with self._lock:
            run = self._runs.pop(number, None)
            if run is None:
                return
            now, display = self._now(), self._reopen(number, run)
            run.steps, run.active, run.gap = steps, None if run.active is None else 0, max(run.gap, now - run.seen)
            others = [other for other in display.live(now, BEHIND) if other is not run]
            display.ended, display.touched = display.ended + 1, now
            if not others and display.ended % display.parts == 0:
                self._close(display.key, finished=True)
                return
            del display.runs[number]
            if display.parts > 1:
                display.base, display.left = display.base + steps, display.left + run.size

    def close(self, key: Hashable) -> None:
        """The program of a loop has stopped."""
        with self._lock:
            if key in self._open:
                self._close(key, finished=False)

    def close_all(self) -> None:
        """No program runs any more."""
        for key in reversed(list(self._open)):
            self.close(key)

    def _reopen(self, number: int, run: Run) -> Display:
        """The display of a run, also if it was closed since the run last reported."""
        display = run.display
        if number not in display.runs or self._open.get(display.key) is not display:
            display = run.display = self._open.setdefault(display.key, display)
            display.runs[number] = run
            self._watch()
        return display

    def _close(self, key: Hashable, finished: bool) -> None:
        """A loop that runs again and again leaves its end only now and then, and one inside another never."""
        display, now = self._open.pop(key), self._now()
        is_next = now - self._left.get(key, -float("inf")) >= RARER * display.every
        leave = not finished or (display.drawing.depth == 0 and is_next)
        if leave and finished:
            self._left[key] = now
        display.drawing.close(display.facts(now), finished, leave)
        display.runs.clear()

    def _watch(self) -> None:
        """Have a thread look for displays whose runs are gone."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._close_what_is_gone, name="loopax progress", daemon=True)
            self._watcher.start()

    def _close_what_is_gone(self) -> None:
        while True:
            time.sleep(1.0)
            with self._lock:
                self.look()
                if not self._open:
                    self._watcher = None
                    return

    def look(self) -> None:
        """Close the displays whose runs have not reported for a long time."""
        with self._lock:
            now = self._now()
            for key in [key for key, display in self._open.items() if not display.live(now, GONE)]:
                self._close(key, finished=False)


DISPLAYS = Displays()
atexit.register(DISPLAYS.close_all)
