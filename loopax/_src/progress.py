"""Progress: what a loop shows while it runs."""

import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeVar

import jax
from jax.core import Tracer

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.display.manager import DISPLAYS
from loopax._src.display.render import has_tqdm
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import Why, code_of, refuse_arrays

T = TypeVar("T")
STYLES = ("auto", "tqdm", "text")
_WHY = Why("what the program shows while it runs", "give the same in all calls: results do not depend on it")


@api_boundary
@dataclass(frozen=True)
class Progress:
    """What a loop shows while it runs: steps, steps per second, and, if known, the remaining time.

    If lanes take different numbers of steps, the loop also shows how many lanes are still active.

    Parameters
    ----------
    label
        The text before the numbers. None: the name of the loop.
    every
        The seconds between two updates: a positive number. The default is 0.1. A file, or the log of a job, gets a line
        about every `10 * every` seconds. The longer the loop has run, the fewer lines it gets.
    style
        How to show the progress:

        - `"tqdm"`: a bar of tqdm (`pip install loopax[progress]`).
        - `"text"`: plain text.
        - `"auto"` (the default): a bar if tqdm can be imported and the output is a terminal or a notebook, else plain
          text.

    Raises
    ------
    TypeError
        `label` is not a string, `every` is not a number, or one of them is traced.
    ValueError
        `every` is not positive, or `style` is unknown.
    ImportError
        The style is `"tqdm"`, and tqdm is not installed.

    Notes
    -----
    Cost: the loop runs at full speed between two reports. With the default `every`, there are about ten reports per
    second. A report takes about 0.1 milliseconds, and so do the beginning and the end of a loop. A loop inside the body
    of another loop pays for its beginning and end in each run. Outside of `jit`, the call waits until a loop that shows
    progress has ended.

    See docs/long-runs.md.

    """

    label: str | None = None
    every: float = 0.1
    style: Literal["auto", "tqdm", "text"] = "auto"

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.label is not None and not isinstance(self.label, str):
            refuse_arrays("Progress(label=...)", self.label, "a string", _WHY)
            raise TypeError(f"Progress(label=...): got {describe(self.label)}, expected a string or None.")
        refuse_arrays("Progress(every=...)", self.every, "a Python number", _WHY)
        if isinstance(self.every, bool) or not isinstance(self.every, Real):
            raise TypeError(f"Progress(every=...): got {describe(self.every)}, expected a number of seconds.")
        if not 0 < float(self.every) < float("inf"):
            raise ValueError(f"Progress(every=...): got {self.every}, expected a positive number of seconds.")
        object.__setattr__(self, "every", float(self.every))
        if self.style not in STYLES:
            choices = ", ".join(map(repr, STYLES))
            raise ValueError(f"Progress(style={self.style!r}) is not a way to show it. Choose one of {choices}.")
        if self.style == "tqdm" and not has_tqdm():
            raise ImportError(
                "Progress(style='tqdm'): tqdm is not installed. Run `pip install loopax[progress]`, or choose "
                "style='text'."
            )


ProgressLike = Progress | bool | None
_warned: set[Progress] = set()


def to_progress(name: str, progress: ProgressLike) -> Progress | None:
    """What is behind the `progress` argument."""
    refuse_arrays(f"{name}(progress=...)", progress, "a Python bool or a `Progress`", _WHY)
    if progress is None or progress is False:
        return None
    if progress is True:
        return Progress()
    if isinstance(progress, Progress):
        return progress
    raise TypeError(
        f"{name}(progress=...): got {describe(progress)}, expected True, False, None or a `loopax.Progress(...)`."
    )


@dataclass(frozen=True)
class Reporter:
    """What the core calls on the host: the progress of one loop of the program.

    The loop is told from others by what it repeats. Nothing that goes wrong here stops the loop.
    """

    progress: Progress
    name: str  # of the loop function
    place: Hashable  # of the user's function
    unit: str = "step"  # what is counted, one of it

    @classmethod
    def of(cls, progress: Progress, name: str, function: Any, unit: str = "step") -> "Reporter":
        """The reporter of a loop of this function."""
        return cls(progress, name, code_of(function) or type(function).__qualname__, unit)

    def begin(self, total: int, runs: int, lanes: int, size: int, before: int = 0) -> tuple[int, int]:
        """A run begins; returns its number, and how many steps to take until it reports.

        So many steps were taken `before`, in another process.
        """

        def begin() -> tuple[int, int]:
            if jax.process_index():
                return 0, MOST_STEPS
            label, every, style = self.progress.label or self.name, self.progress.every, self.progress.style
            groups = {"parts": runs, "lanes": lanes, "size": size, "before": before}
            number = DISPLAYS.begin(self, label, every, style, total=total, unit=self.unit, **groups)
            return number, 1

        return self._shown(begin, (0, MOST_STEPS))

    def report(self, run: int, steps: int, active: int, inner: int | None = None) -> int:
        """A run has taken so many steps; returns how many more it takes until the next report.

        `inner`: what is counted is something else, and so many steps were taken for it.
        """
        return self._shown(lambda: DISPLAYS.report(run, steps, active, inner), MOST_STEPS)

    def end(self, run: int, steps: int) -> None:
        """A run has taken all its steps."""
        self._shown(lambda: DISPLAYS.end(run, steps), None)

    def _shown(self, show: Callable[[], T], otherwise: T) -> T:
        try:
            return show()
        except Exception as error:  # noqa: BLE001 - the user's computation goes on, whatever is wrong with a stream
            what = f"{type(error).__name__}: {error}"
            with suppress(Exception):
                if self.progress not in _warned:
                    _warned.add(self.progress)
                    message = f"loopax cannot show progress, and goes on without: {what}"
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
            return otherwise
        except BaseException:  # Ctrl-C, where JAX runs a program in the main thread
            DISPLAYS.close(self)
            raise

    def close(self) -> None:
        """The loop has stopped."""
        self._shown(lambda: DISPLAYS.close(self), None)

    def watch(self, run: Callable[[], T]) -> T:
        """Run a loop, and close its display at once if that raises.

        What is raised in a callback comes out of JAX as an error of its own, which an interrupt should not be.
        """
        try:
            results = run()
            if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(results)):
                jax.block_until_ready(results)
        except BaseException as error:
            self.close()
            if "\nKeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from error
            raise
        return results


class Shown:
    """What is shown of a run that Python drives, if anything: its steps or items, from where this process began."""

    def __init__(self, reporter: Reporter | None, total: int | None) -> None:
        """Nothing is drawn yet."""
        self._reporter, self._total, self._taken = reporter, total, 0
        self._run: int | None = None

    def begin(self, before: int = 0) -> None:
        """The first is about to begin, after so many in other processes."""
        if self._reporter is not None and self._run is None:
            total = -1 if self._total is None else max(self._total - before, 0)
            self._run, _ = self._reporter.begin(total, 1, 0, 0, before)

    def update(self, taken: int, active: int = -1, inner: int | None = None) -> None:
        """So many are done; the rest is as for `Reporter.report`."""
        if self._reporter is not None and self._run is not None:
            self._taken = taken
            self._reporter.report(self._run, taken, active, inner)

    def end(self, finished: bool) -> None:
        """No more is done; whether the run has come to its end."""
        if self._reporter is not None and self._run is not None:
            if finished:
                self._reporter.end(self._run, self._taken)
            else:
                self._reporter.close()
            self._run = None
