"""How many steps to take at a time, and when to save, so that no more than so much work can be lost."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from operator import index
from typing import Any

import numpy as np

# What asks a process to end: Ctrl-C; SIGTERM; Ctrl-Break, which Windows alone has, and a process can send to another.
_NAMES = ("SIGINT", "SIGTERM", "SIGBREAK")


class Interrupts:
    """The first signal that asks to end, which is remembered; a second one does what it does without loopax."""

    received: int | None = None


@contextmanager
def watching() -> Iterator[Interrupts]:
    """Watch signals; outside of the main thread, which alone may, nothing is ever received."""
    interrupts = Interrupts()
    previous: dict[int, Any] = {}

    def restore() -> None:
        while previous:
            signal.signal(*previous.popitem())

    def remember(number: int, _: Any) -> None:
        if interrupts.received is None:
            interrupts.received = number
            return
        restore()
        signal.raise_signal(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
                if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` and shells tell a process
                    previous[number] = signal.signal(number, remember) or signal.SIG_DFL  # None: not set by Python
        yield interrupts
    finally:
        restore()
    if interrupts.received is not None:  # too late for the run to see it
        signal.raise_signal(interrupts.received)


CHUNK_SECONDS = 0.2  # a chunk takes about so long: signals are looked at between chunks
_MOST_IN_A_ROW = 32  # chunks that are started at once
_GROWTH = 8  # the first chunks are short, and the next ones at most so many times longer
_MARGINS = (0.05, 0.5)  # of `checkpoint_every`: how much earlier a save begins, so that it has ended in time
_FIRST_MARGIN = 0.25


def checkpoint_every(where: str, given: Any) -> tuple[float, bool]:
    """The most work that may be lost, and whether that is a number of steps (an int), not of seconds."""
    is_time = isinstance(given, float | np.floating | timedelta)
    if not is_time and (isinstance(given, bool) or not hasattr(given, "__index__")):
        raise TypeError(
            f"{where}(checkpoint_every=...): got {given!r}, expected an int (steps), a float (seconds) or a "
            "datetime.timedelta."
        )
    number: Any = given.total_seconds() if isinstance(given, timedelta) else given
    amount = float(number) if is_time else index(number)
    if not 0 < amount < inf:
        raise ValueError(
            f"{where}(checkpoint_every=...): got {given!r}, expected a positive number of "
            f"{'seconds' if is_time else 'steps'}."
        )
    return amount, not is_time


@dataclass
class SavePace:
    """Measures steps and saves, and decides from that.

    A kill loses what has been done since the state of the last complete save. So that this is never more than `every`,
    a save begins a margin earlier, and where it has not ended in time the run waits for it.
    """

    every: float  # steps, or seconds of running
    in_steps: bool
    chunk_steps: int | None = None  # steps of a chunk, where the user has said so
    unroll: int = 1
    step_seconds: float | None = None
    save_seconds: float | None = None
    last_chunk: int = 0
    started: tuple[int, float] = field(default=(0, 0.0))  # steps and time of the state that was saved last
    complete: tuple[int, float] = field(default=(0, 0.0))  # of the last complete save
    idle: float = 0.0  # seconds in which the run has waited for saves, which no kill can lose
    save_begun: float = 0.0

    def begin(self, steps: int) -> None:
        self.started = self.complete = (steps, self._worked())

    def chunk(self, steps: int) -> int:
        """Steps to take next, without regard to the end of the loop."""
        most = self.chunk_steps or 1
        if self.chunk_steps is None and self.step_seconds is not None:  # as many as take as long as a chunk should
            most = max(min(int(self._look_seconds / max(self.step_seconds, 1e-9)), _GROWTH * self.last_chunk), 1)
        if self.in_steps:
            most = min(most, max(self.next_save - steps, 1))
        return max(most - most % self.unroll, self.unroll)

    def in_a_row(self, chunk: int) -> int:
        """How many chunks of so many steps take about as long as the time between two looks at signals."""
        if self.chunk_steps is None or self.step_seconds is None:
            return 1
        return min(max(int(self._look_seconds / max(chunk * self.step_seconds, 1e-9)), 1), _MOST_IN_A_ROW)

    @property
    def _look_seconds(self) -> float:
        return CHUNK_SECONDS if self.in_steps else min(CHUNK_SECONDS, self.every / 10)

    @property
    def next_save(self) -> int:
        """The step after which a state is to be saved, where that is counted in steps."""
        return self.started[0] + int(self._save_after())

    def took(self, steps: int, seconds: float) -> None:
        if steps:
            self.step_seconds, self.last_chunk = seconds / steps, max(steps, self.last_chunk // 2)

    def should_save(self, steps: int) -> bool:
        return self._work_since(self.started, steps) >= self._save_after()

    def must_wait(self, steps: int, chunk: int) -> bool:
        """Whether more than `every` allows could be lost in the next chunk, which no save of this state precedes."""
        if self.complete[0] == steps:
            return False
        ahead = chunk if self.in_steps else chunk * (self.step_seconds or 0.0)
        return self._work_since(self.complete, steps) + ahead > self.every

    def saving(self, steps: int) -> None:
        self.started = (steps, self._worked())
        self.save_begun = time.perf_counter()

    def saved(self) -> None:
        if self.complete != self.started:
            self.save_seconds = time.perf_counter() - self.save_begun
            self.complete = self.started

    def _work_since(self, state: tuple[int, float], steps: int) -> float:
        return steps - state[0] if self.in_steps else self._worked() - state[1]

    def _worked(self) -> float:
        """A clock that stands still where the run waits."""
        return time.perf_counter() - self.idle

    def _save_after(self) -> float:
        """The work between two saves."""
        if self.save_seconds is None:
            margin = _FIRST_MARGIN * self.every
        else:
            seconds = 2 * self.save_seconds + CHUNK_SECONDS
            margin = seconds / (self.step_seconds or seconds) if self.in_steps else seconds
        low, high = (part * self.every for part in _MARGINS)
        return self.every - min(max(margin, low), high)
