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

from loopax._src.core.finite import NONE
from loopax._src.core.ir.annotations import UNKNOWN
from loopax._src.core.ir.loop import NO_STOP
from loopax._src.core.jaxpr.util import put_rows, stacked
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.finite import Watched, broken_by
from loopax._src.frontend.steps import first_condition
from loopax._src.frontend.trace import Findings, FirstCondition, Step, Taken, promoting, take_step
from loopax._src.jax_internals import keep_bits, of_weak_type, value_now, zeros
from loopax._src.nnx.functional import clear_errors
from loopax._src.progress import Reporter
from loopax._src.pytrees.leaves import Spec


@dataclass
class PythonSteps:
    """The steps that a loop has taken in Python."""

    step: Step
    extent: Extent
    extras: Sequence[Any]
    xs: Sequence[Any]
    x_rows: Spec
    carry: list[Any]  # after them
    spec: Spec
    goes_on: Any = None  # whether there is another one; None: the loop has no condition
    is_over: bool = False  # there is none
    ys: list[list[Any]] = field(default_factory=list)  # of each step, as of `Taken`
    y_avals: list[Any] = field(default_factory=list)  # their types, where the first step breaks
    found: Findings | None = None  # of all of them; None: there is none
    begun: Sequence[Any] = ()  # the first carry
    watched: Watched | None = None  # what has been looked at; None: nothing, or no step has been taken
    stop: Sequence[Any] = field(default_factory=lambda: list(map(jnp.int32, NO_STOP)))

    @property
    def rest(self) -> Extent:
        """The rows that are left."""
        low, high, number = self.extent.low, self.extent.high, len(self.ys)
        one = {"high": high - number} if self.extent.reverse else {"low": low + number}
        return replace(self.extent, **one)

    def written(self, ys: Sequence[Any] | None = None) -> list[Any]:
        """The rows of all steps, given those of the others; None: there are no others."""
        reverse = self.extent.reverse
        if ys is None:
            avals = list(map(jax.typeof, self.ys[-1])) if self.ys else self.y_avals
            ys = [zeros(stacked(aval, self.extent.capacity or 0)) for aval in avals]
        if not self.ys:
            return list(ys)
        first = self.rest.high if reverse else self.extent.low
        own = [jnp.stack(rows[::-1] if reverse else rows) for rows in zip(*self.ys, strict=True)]
        return [put_rows(*pair, first) for pair in zip(ys, own, strict=True)]

    def add(self, taken: Taken, spec: Spec) -> None:
        """Add a step. Rows of outputs are stacked, so those of all steps have the same types."""
        if (before := self.found) is not None:
            a, b = before.y_spec, taken.found.y_spec
            types = [
                [f"{name} {x.dtype.name}{list(x.shape)}" for name, x in zip(y.names("y"), y.avals, strict=True)]
                for y in (a, b)
            ]
            if a.treedef != b.treedef or types[0] != types[1]:
                raise TypeError(
                    f"{self.step.where} must return rows of the same types in all steps. It returned:\n"
                    f"  in earlier steps: {', '.join(types[0]) or 'no arrays'}\n"
                    f"  in this one: {', '.join(types[1]) or 'no arrays'}"
                    "\nA traced loop (without `jax.disable_jit`) would have seen one of them only."
                )
        self.carry, self.spec, self.goes_on = taken.carry, spec, taken.goes_on
        self.found = taken.found if before is None else taken.found.after(before)
        self.ys.append(taken.ys)

    def _take_one(self, row: int) -> bool:
        """Take the step of a row. False: it is not taken, as it breaks, or as nobody knows whether it does."""
        x = [keep_bits(partial(lax.index_in_dim, index=row, keepdims=False), x) for x in self.xs]

        def one(init: Any, arrays: list[Any], spec: Spec) -> tuple[Taken, list[Any], Spec]:
            taken = take_step(self.step, jnp.int32(row), self.extras, init, arrays, spec, x, self.x_rows)
            return taken, arrays, spec

        arrays = [of_weak_type(x, aval) for x, aval in zip(self.carry, self.spec.avals, strict=True)]
        with clear_errors(f"{self.step.where} changes"):
            taken, arrays, spec = promoting(self.step.where, self.spec.unpack(arrays), one)
        if self.step.finite is not None:
            _, carry, ys, findings = taken
            watched, codes = broken_by(self.step.finite, self.begun, arrays, spec, carry, ys, findings.y_spec)
            found = list(map(value_now, codes))
            if None in found:
                return False
            self.watched = watched if watched.leaves else None
            broken = [k for k, code in enumerate(found) if code != NONE]
            if broken:
                self.is_over, self.stop = True, [*map(jnp.int32, (row, broken[0])), codes[broken[0]].astype(jnp.int32)]
                if self.found is None:  # the first: its results have types all the same
                    self.found, self.y_avals = findings, list(map(jax.typeof, ys))
                    self.carry, self.spec = arrays, spec
                return False
        self.add(taken, spec)
        return True

    def take(self, goes_on: FirstCondition | None, reporter: Reporter | None) -> None:
        """Take steps until a value decides that is not known; `goes_on(extras, init)` decides on the first step."""
        step, extent, extras = self.step, self.extent, self.extras
        if goes_on is not None:
            self.goes_on, self.carry = first_condition(step.where, goes_on, extras, self.spec, self.carry)
        low, high = value_now(extent.low), value_now(extent.high)
        if low is None or high is None:
            return
        rows = range(int(low), int(high))
        shown_by, due = None, 0  # the number of the display, and the step that it shows next
        for row in reversed(rows) if extent.reverse else rows:
            is_next = True if goes_on is None else value_now(self.goes_on)
            if not is_next:
                self.is_over = is_next is not None
                break
            if reporter is not None:  # as a traced loop does it (`core/ir/annotations.py`)
                if shown_by is None:
                    shown_by, due = reporter.begin(UNKNOWN if goes_on else len(rows), 1, 0, 0)
                if len(self.ys) == due:
                    due += reporter.report(shown_by, len(self.ys), UNKNOWN)
            if not self._take_one(row):
                break
        else:
            self.is_over = True
        if reporter is not None and shown_by is not None:
            reporter.end(shown_by, len(self.ys))
