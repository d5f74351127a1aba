"""A loop as a function of arrays: its first condition, its steps, and its results.

Outside of `jax.jit` it is compiled as one program. So it moves no constants to the device, and JAX keeps what its
transformations make of the program from one call to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src import core
from loopax._src.core.jaxpr.util import padded, split_list
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun, keep_bits, vary_like, zeros


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
