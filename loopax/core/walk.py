"""How rows are walked: `lax.while_loop` over the rows of a loop, or of a part of one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax.core.jaxprs import MOST_STEPS

# (position, carry) -> (carry, y); the constants and the rows of xs are inside.
Step = Callable[[Any, list[Any]], tuple[list[Any], list[Any]]]


class Progress(NamedTuple):
    """The state of a running loop.

    The order counts: with the position first, XLA's CPU backend runs a tiny step 13 % slower.
    """

    carry: list[Any]
    ys: list[Any]  # rows already walked are written, others zero
    position: Any  # of the next step, while there is one: a row number, or one counted from elsewhere


class Steps(NamedTuple):
    """The step of a loop, given its constants."""

    make: Callable[[Sequence[Any]], Step]
    consts: Sequence[Any]
    row_of: Callable[[Any], Any] = lambda position: position  # the row of ys that a position writes
    common: "Common | None" = None
    # Where constants are lent: from the state at the start of a stretch of steps to the constants as
    # lent there, and to whether a later state still belongs to the stretch.
    lend: Callable[[Progress], tuple[list[Any], Callable[[Progress], Any]]] | None = None


class Common(NamedTuple):
    """The positions `first ... end - 1` are those of rows that all lanes of a batch walk; None: no limit."""

    make: Callable[[Sequence[Any]], Step]  # the step there
    first: Any
    end: Any


class Walk(NamedTuple):
    """How to walk: which way, how many steps at a time, and whether the carry may stop it."""

    reverse: bool
    unroll: int = 1
    predicated: bool = False
    limited: bool = True  # False: only the predicate stops it, and the position has no meaning

    def first(self, low: Any, high: Any) -> Any:
        """The row of the first step."""
        return high - 1 if self.reverse else low

    def advance(self, position: Any, steps: Any) -> Any:
        """The position so many steps on."""
        return position - steps if self.reverse else position + steps

    def distance(self, start: Any, position: Any) -> Any:
        """Steps from one position to another."""
        return start - position if self.reverse else position - start

    def run(self, steps: Steps, progress: Progress, end: Any) -> Progress:
        """Walk until the position is `end` (the first that is not walked), or the predicate is False."""
        if steps.lend is not None:
            return self._run_stretches(steps, steps.lend, progress, end)
        for make, stop in self._parts(steps, end):
            step = make(steps.consts)
            for size in [self.unroll, 1] if self.unroll > 1 else [1]:
                progress = lax.while_loop(self._enough(stop, size), self._several(step, size, steps.row_of), progress)
        return progress

    def _parts(self, steps: Steps, end: Any) -> list[tuple[Callable[[Sequence[Any]], Step], Any]]:
        """Steps to take one after another, each until its own end: rows that all lanes walk have their own step."""
        if steps.common is None:
            return [(steps.make, end)]
        common, first, last = steps.common
        if self.reverse:
            first, last = (None if limit is None else limit - 1 for limit in (last, first))
        nearer = jnp.maximum if self.reverse else jnp.minimum
        parts = [] if first is None else [(steps.make, nearer(first, end))]
        return [*parts, (common, end)] if last is None else [*parts, (common, nearer(last, end)), (steps.make, end)]

    def run_at_most_once(self, steps: Steps, progress: Progress, end: Any) -> Progress:
        """The same for a loop of one step or none, as a condition: XLA moves what is constant out of a loop."""
        one = self._several(steps.make(steps.consts), 1, steps.row_of)
        return lax.cond(self._enough(end, 1)(progress), one, lambda progress: progress, progress)

    def _run_stretches(self, steps: Steps, lend: Any, progress: Progress, end: Any) -> Progress:
        """The same with constants that are lent anew for each stretch."""
        enough = self._enough(end, 1)

        def stretch(progress: Progress) -> Progress:
            consts, belongs = lend(progress)
            one = self._several(steps.make(consts), 1, steps.row_of)
            return lax.while_loop(lambda later: enough(later) & belongs(later), one, progress)

        return lax.while_loop(enough, stretch, progress)

    def _enough(self, end: Any, size: int) -> Callable[[Progress], Any]:
        """Whether `size` steps remain, and the predicate holds."""
        last = self.advance(end, -(size - 1))  # compared with as it is: tiny loops feel a subtraction

        def goes_on(progress: Progress) -> Any:
            enough = progress.position > last if self.reverse else progress.position < last
            if not self.predicated:
                return enough
            return progress.carry[0] & enough if self.limited else progress.carry[0]

        return goes_on

    def _several(self, step: Step, size: int, row_of: Callable[[Any], Any]) -> Callable[[Progress], Progress]:
        """Take `size` steps."""

        def several(progress: Progress) -> Progress:
            carry, buffers, position = progress
            for _ in range(size):
                carry, y = step(position, carry)
                row = row_of(position)
                buffers = [write(buffer, row, value) for buffer, value in zip(buffers, y, strict=True)]
                position = self.advance(position, 1 if self.limited else (position < MOST_STEPS).astype(jnp.int32))
            return Progress(carry, buffers, position)

        return several


def read(array: Any, row: Any) -> Any:
    """One row; row numbers here are never negative, so JAX need not check."""
    return lax.dynamic_index_in_dim(array, row, 0, keepdims=False, allow_negative_indices=False)


def write(array: Any, row: Any, value: Any) -> Any:
    """The array with one row replaced, in place where it stands in a loop's state."""
    return lax.dynamic_update_index_in_dim(array, value, row, 0, allow_negative_indices=False)
