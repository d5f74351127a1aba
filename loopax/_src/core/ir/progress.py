"""A loop that tells, while it runs, how far it is.

Whoever wants to know is a *reporter*, any hashable object with three methods that are called on the host:

- `begin(total, runs, lanes, size)` returns a number for this run, and the number of steps until the first report;
- `report(run, steps, active)`, after so many steps, returns the number of steps until the next report;
- `end(run, steps)` is told the number of steps.

`total` is -1 where the number of steps is not known beforehand, `active` where there are no lanes to count.

Nothing is called from the step: a loop walks at full speed until the step whose turn it is (`lowering/while_loop.py`).
Calls are written when the loop is compiled, and are no effect of the primitive: showing progress is no part of what a
program means. So a loop whose results nobody uses is dead code, and shows nothing; and no rule has to know of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

UNKNOWN = -1


class Reporting(NamedTuple):
    """What is static about the reports of a loop."""

    reporter: Any
    counts_lanes: bool = False  # a leaf of the carry, behind the predicate, is the number of lanes that go on
    runs: int = 1  # so many loops are reported as one: a batch that is run in parts
    lanes: int = 0  # where these parts are groups of lanes: of all groups
    size: int = 0  # and of this one


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
