"""Loops under `jax.disable_jit`: steps are taken in Python, on values, so that a body can print them and stop there.

Where the next step depends on a value that is not known, as in a batch, a traced loop goes on from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.ir.annotations import UNKNOWN
from loopax._src.core.jaxpr.util import put_rows, stacked
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.steps import first_condition
from loopax._src.frontend.trace import Findings, FirstCondition, Step, Taken, promoting, take
from loopax._src.jax_internals import keep_bits, of_weak_type, value_now, zeros
from loopax._src.nnx.functional import clear_errors
from loopax._src.progress import Reporter
from loopax._src.pytrees.leaves import Spec, pack


@dataclass
class PythonSteps:
    """The steps that a loop has taken in Python."""

    extent: Extent
    carry: list[Any]  # after them
    spec: Spec
    goes_on: Any = None  # whether there is another one; None: the loop has no condition
    is_over: bool = False  # there is none
    ys: list[list[Any]] = field(default_factory=list)  # of each step, as of `Taken`
    found: Findings | None = None  # of all of them; None: there is none

    @property
    def number(self) -> int:
        """How many they are."""
        return len(self.ys)

    @property
    def rest(self) -> Extent:
        """The rows that are left."""
        low, high, number = self.extent.low, self.extent.high, self.number
        one = {"high": high - number} if self.extent.reverse else {"low": low + number}
        return replace(self.extent, **one)

    def written(self, ys: Sequence[Any] | None = None) -> list[Any]:
        """The rows of all steps, given those of the others; None: there are no others."""
        reverse = self.extent.reverse
        if ys is None:
            ys = [zeros(stacked(jax.typeof(y), self.extent.capacity or 0)) for y in self.ys[-1]]
        first = self.rest.high if reverse else self.extent.low
        own = [jnp.stack(rows[::-1] if reverse else rows) for rows in zip(*self.ys, strict=True)]
        return [put_rows(*pair, first) for pair in zip(ys, own, strict=True)]

    def add(self, where: str, taken: Taken, spec: Spec) -> None:
        """Add a step. Rows of outputs are stacked, so those of all steps have the same types."""
        if (before := self.found) is not None:
            a, b = before.y_spec, taken.found.y_spec
            types = [
                [f"{name} {x.dtype.name}{list(x.shape)}" for name, x in zip(y.names("y"), y.avals, strict=True)]
                for y in (a, b)
            ]
            if (before.rows.written, a.treedef) != (taken.found.rows.written, b.treedef) or types[0] != types[1]:
                raise TypeError(
                    f"{where} must return rows of the same types in all steps. It returned:\n"
                    f"  in earlier steps: {', '.join(types[0]) or 'no arrays'}\n"
                    f"  in this one: {', '.join(types[1]) or 'no arrays'}"
                    "\nA traced loop (without `jax.disable_jit`) would have seen one of them only."
                )
        self.carry, self.spec, self.goes_on = taken.carry, spec, taken.goes_on
        self.found = taken.found if before is None else taken.found.after(before)
        self.ys.append(taken.ys)


def take_steps(
    step: Step,
    extent: Extent,
    extras: Sequence[Any],
    init: Any,
    xs: Sequence[Any],
    x_rows: Spec,
    goes_on: FirstCondition | None,
    reporter: Reporter | None,
) -> PythonSteps:
    """Take steps until a value decides that is not known; `goes_on(extras, init)` decides on the first step."""
    steps = PythonSteps(extent, *pack(init))
    if goes_on is not None:
        steps.goes_on, steps.carry = first_condition(step.where, goes_on, extras, steps.spec, steps.carry)
    low, high = value_now(extent.low), value_now(extent.high)
    if low is None or high is None:
        return steps
    rows = range(int(low), int(high))
    shown_by, due = None, 0  # the number of the display, and the step that it shows next
    for row in reversed(rows) if extent.reverse else rows:
        is_next = True if goes_on is None else value_now(steps.goes_on)
        if not is_next:
            steps.is_over = is_next is not None
            break
        if reporter is not None:  # as a traced loop does it (`core/ir/annotations.py`)
            if shown_by is None:
                shown_by, due = reporter.begin(UNKNOWN if goes_on else len(rows), 1, 0, 0)
            if steps.number == due:
                due += reporter.report(shown_by, steps.number, UNKNOWN)
        x = [keep_bits(partial(lax.index_in_dim, index=row, keepdims=False), x) for x in xs]

        def one(init: Any, arrays: list[Any], spec: Spec) -> tuple[Taken, Spec]:
            return take(step, jnp.int32(row), extras, init, arrays, spec, x, x_rows), spec  # noqa: B023

        arrays = [of_weak_type(x, aval) for x, aval in zip(steps.carry, steps.spec.avals, strict=True)]
        with clear_errors(f"{step.where} changes"):
            steps.add(step.where, *promoting(step.where, steps.spec.unpack(arrays), one))
    else:
        steps.is_over = True
    if reporter is not None and shown_by is not None:
        reporter.end(shown_by, steps.number)
    return steps
