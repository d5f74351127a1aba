"""A loop as a function of arrays: its first condition, its steps, and its results.

Outside of `jax.jit` it is compiled as one program. So it moves no constants to the device, and JAX keeps what its
transformations make of the program from one call to the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import core
from loopax._src.core.ir.annotations import UNKNOWN
from loopax._src.core.jaxpr.util import padded, put_rows, split_list, stacked
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.steps import first_condition
from loopax._src.frontend.trace import FirstCondition, Found, Step, Taken, promoting, take
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun, keep_bits, of_weak_type, value_now, vary_like, zeros
from loopax._src.nnx.writeback import clear_errors
from loopax._src.progress import Reporter
from loopax._src.pytrees.leaves import Spec, pack

# Loops under `jax.disable_jit`: steps are taken in Python, on values, so that a body can print them and stop there.
#
# Where the next step depends on a value that is not known, as in a batch, a traced loop goes on from there.


@dataclass
class PythonSteps:
    """The steps that a loop has taken in Python."""

    extent: Extent
    reverse: bool
    carry: list[Any]  # after them
    spec: Spec
    goes_on: Any = None  # whether there is another one; None: the loop has no condition
    is_over: bool = False  # there is none
    ys: list[list[Any]] = field(default_factory=list)  # of each step, as of `Taken`
    found: Found | None = None  # of all of them; None: there is none

    @property
    def number(self) -> int:
        """How many they are."""
        return len(self.ys)

    @property
    def rest(self) -> Extent:
        """The rows that are left."""
        low, high, number = self.extent.low, self.extent.high, self.number
        return replace(self.extent, high=high - number) if self.reverse else replace(self.extent, low=low + number)

    def written(self, ys: Sequence[Any] | None = None) -> list[Any]:
        """The rows of all steps, given those of the others; None: there are no others."""
        if ys is None:
            ys = [zeros(stacked(jax.typeof(y), self.extent.capacity or 0)) for y in self.ys[-1]]
        first = self.rest.high if self.reverse else self.extent.low
        own = [jnp.stack(rows[::-1] if self.reverse else rows) for rows in zip(*self.ys, strict=True)]
        return [put_rows(*pair, first) for pair in zip(ys, own, strict=True)]

    def add(self, where: str, taken: Taken, spec: Spec) -> None:
        """Add a step."""
        if self.found is not None:
            _refuse_other_rows(where, self.found, taken.found)
        self.carry, self.spec, self.goes_on = taken.carry, spec, taken.goes_on
        self.found = taken.found if self.found is None else taken.found.after(self.found)
        self.ys.append(taken.ys)


def take_steps(
    step: Step,
    extent: Extent,
    reverse: bool,
    extras: Sequence[Any],
    init: Any,
    xs: Sequence[Any],
    x_rows: Spec,
    goes_on: FirstCondition | None,
    reporter: Reporter | None,
) -> PythonSteps:
    """Take steps until a value decides that is not known; `goes_on(extras, init)` decides on the first step."""
    steps = PythonSteps(extent, reverse, *pack(init))
    if goes_on is not None:
        steps.goes_on, steps.carry = first_condition(step.where, goes_on, extras, steps.spec, steps.carry)
    low, high = value_now(extent.low), value_now(extent.high)
    if low is None or high is None:
        return steps
    rows = range(int(low), int(high))
    show = _display(reporter, UNKNOWN if goes_on else len(rows))
    for row in reversed(rows) if reverse else rows:
        is_next = True if goes_on is None else value_now(steps.goes_on)
        if not is_next:
            steps.is_over = is_next is not None
            break
        show(steps.number)
        x = [keep_bits(partial(lax.index_in_dim, index=row, keepdims=False), x) for x in xs]

        def one(init: Any, arrays: list[Any], spec: Spec) -> tuple[Taken, Spec]:
            return take(step, jnp.int32(row), extras, init, arrays, spec, x, x_rows), spec  # noqa: B023

        arrays = [of_weak_type(x, aval) for x, aval in zip(steps.carry, steps.spec.avals, strict=True)]
        with clear_errors(f"{step.where} changes"):
            steps.add(step.where, *promoting(step.where, steps.spec.unpack(arrays), one))
    else:
        steps.is_over = True
    show(steps.number, ends=True)
    return steps


def _display(reporter: Reporter | None, total: int) -> Callable[..., None]:
    """A function that shows how many steps have been taken, as a traced loop does (`core/ir/annotations.py`)."""
    run, due = None, 0

    def show(number: int, ends: bool = False) -> None:
        nonlocal run, due
        if reporter is None or (ends and run is None):
            return
        if run is None:
            run, due = reporter.begin(total, 1, 0, 0)
        if ends:
            reporter.end(run, number)
        elif number == due:
            due += reporter.report(run, number, UNKNOWN)

    return show


def _refuse_other_rows(where: str, before: Found, now: Found) -> None:
    """Rows of outputs are stacked, so those of all steps have the same types."""
    names = ("in earlier steps", before), ("in this one", now)
    types = [(found.rows.written, found.y_spec.treedef, _types(found.y_spec)) for _, found in names]
    if types[0] != types[1]:
        raise TypeError(
            f"{where} must return rows of the same types in all steps. It returned:\n"
            + "\n".join(f"  {when}: {', '.join(_types(found.y_spec)) or 'no arrays'}" for when, found in names)
            + "\nA traced loop (without `jax.disable_jit`) would have seen one of them only."
        )


def _types(spec: Spec) -> list[str]:
    shapes = [f"{aval.dtype.name}{list(aval.shape)}" for aval in spec.avals]
    return [f"{name} {shape}" for name, shape in zip(spec.names("y"), shapes, strict=True)]


class Given(NamedTuple):
    """The arrays of a loop."""

    low: Any  # None where the program knows it
    high: Any  # likewise
    first: Sequence[Any]  # what the condition closes over, or whether to take the first step
    consts: Sequence[Any]  # what the body closes over, and behind it `extras` of a step
    carry: Sequence[Any]
    references: Sequence[Any]  # the values of mutable arrays that the body closes over
    xs: Sequence[Any]


class Results(NamedTuple):
    """What a loop returns."""

    num_steps: Any
    goes_on: Any  # None: the loop has no condition
    carry: list[Any]
    flags: list[Any]  # of checks in the body
    references: list[Any]
    ys: list[Any]


@dataclass(frozen=True)
class Program:
    """A loop, and the static facts about its operands."""

    loop: core.Loop
    is_free: bool
    low: int | None
    high: int | None
    first: ClosedJaxpr | None  # (*closes over, *extras, *carry) -> whether to take the first step
    num_extras: int
    num_arrays: int  # of the user's carry
    num_flags: int
    capacity: int | None  # rows of ys

    def operands(self, given: Given) -> core.LoopOperands:
        """The operands of the loop."""
        loop, carry = self.loop, given.carry
        low = given.low if self.low is None else jnp.int32(self.low)
        high = given.high if self.high is None else jnp.int32(self.high)
        go = given.first
        if self.first is not None:
            extras = given.consts[len(given.consts) - self.num_extras :]
            go = jaxpr_as_fun(self.first)(*given.first, *extras, *carry)
        if loop.predicated:
            go = [vary_like(go[0], loop.body.out_avals[0])]
        first_flag = len(go) + self.num_arrays
        flags = [zeros(aval) for aval in loop.body.out_avals[first_flag : first_flag + self.num_flags]]
        xs = [keep_bits(lambda x: x[: loop.bound], x) for x in given.xs]
        return core.LoopOperands(low, high, given.consts, [*go, *carry, *flags, *given.references], xs)

    def results(self, out: core.Outcome) -> Results:
        """The results of the loop from those of the core."""
        num_go = int(self.loop.predicated)
        go, carry, flags, references = split_list(out.carry, [num_go, self.num_arrays, self.num_flags])
        ys = [self._with_all_rows(y) for y in out.ys]
        return Results(out.num_steps, go[0] if go else None, carry, flags, references, ys)

    def _with_all_rows(self, y: jax.Array) -> jax.Array:
        """Zero rows for those beyond a static bound below the capacity."""
        missing = (self.capacity or 0) - y.shape[0]
        return padded(y, missing) if missing else y


@partial(jax.jit, static_argnums=0)
def compiled(program: Program, given: Given) -> Results:
    """Run a loop with the derivative that its kind's plan gives."""
    loop, operands = program.loop, program.operands(given)
    return program.results(core.run_free(loop, *operands) if program.is_free else core.run_with_tape(loop, operands))
