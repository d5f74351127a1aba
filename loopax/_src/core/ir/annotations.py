"""Where a loop comes from: what a user called, and the names of what goes through it. No rule looks at it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from loopax._src.core.jaxpr.evaluate import silent
from loopax._src.core.jaxpr.util import rewriting, select
from loopax._src.jax_internals import ClosedJaxpr, map_parameter, with_params

# A loop that tells, while it runs, how far it is.
#
# Whoever wants to know is a *reporter*, any hashable object with three methods that are called on the host:
#
# - `begin(total, runs, lanes, size)` returns a number for this run, and the number of steps until the first report;
# - `report(run, steps, active)`, after so many steps, returns the number of steps until the next report;
# - `end(run, steps)` is told the number of steps.
#
# `total` is -1 where the number of steps is not known beforehand, `active` where there are no lanes to count.
#
# Nothing is called from the step: a loop walks at full speed until the step whose turn it is
# (`core/lowering/rows.py`). Calls are written when the loop is compiled, and are no effect of the primitive: showing
# progress is no part of what a program means. So a loop whose results nobody uses is dead code, and shows nothing;
# and no rule has to know of them.


UNKNOWN = -1


class Reporting(NamedTuple):
    """What is static about the reports of a loop."""

    reporter: Any
    counts_lanes: bool = False  # a leaf of the carry, behind the predicate, is the number of lanes that go on
    runs: int = 1  # a batch that is run in parts is reported as one loop: the number of its parts
    lanes: int = 0  # if the parts are groups of lanes: the number of lanes in all groups together
    size: int = 0  # the number of lanes in this group


class Reports(NamedTuple):
    """The reports of one run of a loop."""

    reporter: Any
    run: Any  # int32[]: the number of the run
    first: Any  # steps until the first report

    @classmethod
    def begin(cls, reporting: Reporting, total: Any) -> "Reports":
        """A run begins."""
        reporter, _, runs, lanes, size = reporting
        run, first = _call(lambda total: reporter.begin(total, runs, lanes, size), 2, total)
        return cls(reporter, run, first)

    def report(self, steps: Any, active: Any) -> Any:
        """So many steps are done; returns how many more to take before the next report."""
        (stride,) = _call(lambda *numbers: [self.reporter.report(*numbers)], 1, self.run, steps, active)
        return stride

    def end(self, steps: Any) -> None:
        """All steps are done."""
        _call(self.reporter.end, 0, self.run, steps)


def _call(function: Callable[..., Any], num_results: int, *numbers: Any) -> list[Any]:
    """Call on the host with Python integers, for integers: in one array each way, which takes half the time."""

    def call(numbers: Any) -> np.ndarray | None:
        results = function(*np.asarray(numbers).tolist())
        return np.asarray(results, np.int32) if num_results else None

    results = jax.ShapeDtypeStruct((num_results,), jnp.int32) if num_results else None
    found = io_callback(call, results, jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers]))
    return [found[i] for i in range(num_results)]


# Programs whose loops do not show progress: recomputed steps are not shown a second time.


def strip_progress_of_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation, with programs that do not show progress."""
    unreported = lambda value: None if isinstance(value, Reporting) else value  # noqa: E731
    return {name: map_parameter(value, strip_progress, unreported) for name, value in params.items()}


def strip_progress_of_equation(eqn: Any) -> Any:
    """The equation, with programs that do not show progress."""
    return with_params(eqn, strip_progress_of_params(eqn.params))


strip_progress = rewriting(strip_progress_of_equation)


# Programs without effects: recomputed steps do not repeat these.


def without_effects(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop effectful equations without results (debug prints) and progress: recomputed steps do not repeat these."""
    return silent(strip_progress(closed))


UNNAMED = ""


class Names(NamedTuple):
    """The names of a loop's operands and rows of results, as paths in a user's pytrees.

    A rule that changes which there are may leave them as they are: names that do not fit are not shown.
    """

    consts: tuple[str, ...]
    carry: tuple[str, ...]
    xs: tuple[str, ...]
    ys: tuple[str, ...]

    def keep(self, *masks: Sequence[bool]) -> "Names":
        """Those of what is kept of each."""
        pairs = zip(masks, self, strict=True)
        return Names(*(tuple(select(mask, names)) if len(mask) == len(names) else () for mask, names in pairs))

    def with_tangents(self, *masks: Sequence[bool]) -> "Names":
        """The names of operands on pairs: behind each group, those of its tangents."""
        pairs = zip(self, self.keep(*masks), strict=True)
        return Names(*((*names, *(f"tangent of {name}" for name in dots)) for names, dots in pairs))

    def fit(self, sizes: Sequence[int]) -> "Names":
        """For so many of each."""
        pairs = zip(self, sizes, strict=True)
        return Names(*(names if len(names) == size else (UNNAMED,) * size for names, size in pairs))


class BlockInfo(NamedTuple):
    """A block of a nest whose lanes are free."""

    words: str
    nanoseconds: float  # expected, for 64 lanes
    waits: bool  # whether lanes of a batch wait there for others


@dataclass(frozen=True)
class DebugInfo:
    """What a user called."""

    function: str
    kind: Any  # as it was given
    lanes: Any
    fixed: bool  # the call always takes as many steps, known when traced
    names: Names
    most_steps: int | None = None  # of the call, from which a kind may make several loops
    waiting: int = 1  # lanes that stop at different steps and run until the slowest is done
    branch: str = ""  # of a `cond` or a `switch`: the function of the user's
    mixed_by: str = ""  # the primitive that mixes lanes, for which a batch is in lockstep that would not be
    lanes_expected: tuple[tuple[str, float], ...] = ()  # ways to run lanes, and nanoseconds, from which one was chosen
    blocks: tuple[BlockInfo, ...] = ()  # of a nest whose lanes are free

    def renamed(self, names: Names) -> "DebugInfo":
        """Give the operands and results other names."""
        return replace(self, names=names)

    def in_lockstep(self, lanes: Any, consts: int, carry: int) -> "DebugInfo":
        """A batch that waits for its slowest lane, with so many more constants and leaves of the carry in front."""
        names = self.names
        names = names._replace(consts=(UNNAMED,) * consts + names.consts, carry=(UNNAMED,) * carry + names.carry)
        waiting = self.waiting * lanes if isinstance(lanes, int) else self.waiting
        return replace(self, names=names, waiting=waiting)

    def __repr__(self) -> str:
        """Short, for it stands in printed jaxprs."""
        return self.function
