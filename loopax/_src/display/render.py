"""How progress is drawn: a bar of tqdm, a line that is written over, or a line now and then."""

import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from loopax._src.extras import is_installed

# In a log, a line is written when so many times the interval of a terminal have passed, and when the loop has run
# longer by this share.
RARER, LONGER = 10, 0.1
# Clears the line of a terminal. A console of Windows may print the code for it as it is.
_CLEAR = f"\r{' ' * 79}\r" if os.name == "nt" else "\r\x1b[K"


@dataclass(frozen=True)
class Facts:
    """How far a loop is."""

    label: str
    steps: int
    total: int | None  # None: not known
    seconds: float
    active: int | None  # lanes; None: there are none to count
    unit: str = "step"  # what is counted, one of it
    inner: int | None = None  # steps, where something else is counted
    before: int = 0  # steps that were taken in another process

    @property
    def rate(self) -> float:
        return self.steps / self.seconds if self.seconds > 0 else 0.0

    @property
    def count(self) -> str:
        """The steps that are done, of how many."""
        if self.total is None:
            return f"{self.steps} {self.unit}s"
        share = f" ({100 * self.steps // self.total}%)" if self.total else ""
        return f"{self.steps}/{self.total} {self.unit}s{share}"

    @property
    def speed(self) -> str:
        if not self.rate:
            return f"no {self.unit} yet"
        return f"{self.rate:.3g} {self.unit}s/s" if self.rate >= 1 else f"{1 / self.rate:.3g} s/{self.unit}"

    @property
    def beside(self) -> str:
        """What stands beside the count and its rate, if anything does."""
        inner = "" if self.inner is None or not self.seconds else f"{self.inner / self.seconds:.3g} steps/s"
        lanes = "" if self.active is None else f"{self.active} {'lane' if self.active == 1 else 'lanes'} active"
        return ", ".join(filter(None, (inner, lanes)))

    @property
    def running(self) -> str:
        parts = [self.count, self.speed]
        if self.total is not None and self.rate:
            parts.append(f"{clock(max(self.total - self.steps, 0) / self.rate)} left")
        return f"{self.label}: {', '.join([*parts, self.beside] if self.beside else parts)}"

    def closed(self, finished: bool) -> str:
        if finished:
            speed = f", {self.speed}" if self.rate else ""
            before = f", after {self.before} that were saved" if self.before else ""
            return f"{self.label}: {self.steps} {self.unit}s in {clock(self.seconds)}{speed}{before}"
        return f"{self.label}: last seen after {self.count}, in {clock(self.seconds)}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Drawing(ABC):
    """What is drawn of one loop."""

    stays: bool  # what is drawn stays, and is not drawn over
    depth: int  # so many loops are around it

    def interval(self, every: float, elapsed: float) -> float:
        """Seconds to the next time it is drawn."""
        return max(RARER * every, LONGER * elapsed) if self.stays else every

    @abstractmethod
    def draw(self, facts: Facts) -> None:
        """Draw how far it is."""

    @abstractmethod
    def close(self, facts: Facts, finished: bool, leave: bool) -> None:
        """Draw the end, if it is to be left there, and nothing after that."""


class Text(Drawing):
    """Lines, each of which stays; or one of a terminal, written over: loops inside others stand behind them."""

    _texts: ClassVar[dict[int, str]] = {}  # what stands in the line, by depth

    def __init__(self, depth: int) -> None:
        self.depth, self.stays = depth, not _is_terminal()

    def draw(self, facts: Facts) -> None:
        if self.stays:
            _write(f"{facts.running}\n")
        else:
            self._texts[self.depth] = facts.running
            self._show()

    def close(self, facts: Facts, finished: bool, leave: bool) -> None:
        drawn = self._texts.pop(self.depth, None) is not None
        if leave:
            _write(f"{'' if self.stays else _CLEAR}{facts.closed(finished)}\n")
        if drawn and (self._texts or not leave):
            self._show()

    def _show(self) -> None:
        _write(_CLEAR + " | ".join(self._texts[depth] for depth in sorted(self._texts)))


class Bar(Drawing):
    """A bar of tqdm, under those of the loops around it."""

    def __init__(self, depth: int) -> None:
        self.depth, self.stays = depth, not _is_live()
        self.bar: Any = None  # until it is first drawn

    def draw(self, facts: Facts) -> None:
        if self.bar is None:
            from tqdm.auto import tqdm

            unit = f" {facts.unit}s"
            where: Any = {"position": self.depth, "file": sys.stderr}
            self.bar = tqdm(total=facts.total, desc=facts.label, unit=unit, disable=False, **where)
            self.bar.start_t -= facts.seconds  # it began when the loop did
        self.bar.n = facts.steps
        if facts.beside:
            self.bar.set_postfix_str(facts.beside, refresh=False)
        self.bar.refresh()

    def close(self, facts: Facts, finished: bool, leave: bool) -> None:  # noqa: ARG002 - the bar shows how far it came
        leave = leave and self.depth == 0
        if leave:
            self.draw(facts)
        if self.bar is not None:
            self.bar.leave = leave
            self.bar.close()
            self.bar = None


def drawing(style: str, depth: int) -> Drawing:
    """The drawing of a loop inside so many others."""
    if style == "tqdm" or (style == "auto" and has_tqdm() and _is_live()):
        return Bar(depth)
    return Text(depth)


@cache
def has_tqdm() -> bool:
    return is_installed("tqdm")


def _is_live() -> bool:
    """Whether what is drawn can be drawn again: in a terminal, or a kernel of Jupyter, which is imported then."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return _is_terminal() or type(shell).__name__ == "ZMQInteractiveShell"


def _is_terminal() -> bool:
    return getattr(sys.stderr, "isatty", lambda: False)()


def _write(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()
