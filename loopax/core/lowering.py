"""How a loop runs: `lax.while_loop` over rows, or over blocks of rows where the loop saves."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._compat import jaxpr_as_fun, mlir, zeros
from loopax.core.jaxprs import select, split, stacked
from loopax.core.lending import in_stretches
from loopax.core.loop import Loop, loop_p, result_avals

MOST_STEPS = 2**31 - 1  # where the count of a loop without a bound stays

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
    # Where constants are lent: from the state at the start of a stretch of steps to the constants as
    # lent there, and to whether a later state still belongs to the stretch.
    lend: Callable[[Progress], tuple[list[Any], Callable[[Progress], Any]]] | None = None


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
        step = steps.make(steps.consts)
        for size in [self.unroll, 1] if self.unroll > 1 else [1]:
            progress = lax.while_loop(self._enough(end, size), self._several(step, size, steps.row_of), progress)
        return progress

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


def _run(low: Any, high: Any, *operands: Any, **params: Any) -> list[Any]:
    loop = Loop(**params)
    consts, carry, xs = split(operands, loop.sizes)
    if loop.bound == 0:  # there are no rows that a step could read
        return [jnp.int32(0), *carry, *(zeros(aval) for aval in result_avals(loop)[1 + loop.num_carry :])]
    body = jaxpr_as_fun(loop.body)

    def with_consts(consts: Sequence[Any]) -> Step:
        def step(row: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
            carry, y = split(body(row, *consts, *carry, *(read(x, row) for x in xs)), [loop.num_carry])
            return carry, y

        return step

    def active_at(progress: Progress) -> Any:
        return loop.lent and jaxpr_as_fun(loop.lent.activity)(progress.position, *consts, *progress.carry)[0]

    steps = Steps(with_consts, consts, lend=loop.lent and in_stretches(loop.lent, consts, active_at))

    walk = Walk(loop.reverse, loop.unroll, loop.predicated, loop.bound is not None or not loop.predicated)
    start = walk.first(low, high)
    ys = [zeros(stacked(aval, loop.bound or 0)) for aval in loop.output_avals[1]]
    progress = Progress(carry, ys, start)
    end = low - 1 if loop.reverse else high
    if loop.block:
        progress, saved = _run_saving(loop, walk, steps, progress, end)
    else:
        progress, saved = walk.run(steps, progress, end), []
    return [walk.distance(start, progress.position), *progress.carry, *progress.ys, *saved]


def _run_saving(loop: Loop, walk: Walk, steps: Steps, progress: Progress, end: Any) -> tuple[Progress, list[Any]]:
    """Walk block by block, saving the carry at the start of each."""
    kept = select(loop.saved_mask, loop.output_avals[0])
    saved = [zeros(stacked(aval, loop.num_blocks)) for aval in kept]

    def goes_on(state: tuple[Any, Progress, list[Any]]) -> Any:
        _, progress, _ = state
        remain = walk.distance(progress.position, end) > 0
        return remain & progress.carry[0] if loop.predicated else remain

    def one_block(state: tuple[Any, Progress, list[Any]]) -> tuple[Any, Progress, list[Any]]:
        block, progress, saved = state
        values = select(loop.saved_mask, progress.carry)
        saved = [write(buffer, block, value) for buffer, value in zip(saved, values, strict=True)]
        limit = jnp.maximum if loop.reverse else jnp.minimum
        block_end = limit(walk.advance(progress.position, loop.block), end)
        return block + 1, walk.run(steps, progress, block_end), saved

    _, progress, saved = lax.while_loop(goes_on, one_block, (jnp.int32(0), progress, saved))
    return progress, saved


_run_compiled = jax.jit(_run, static_argnames=Loop._fields)


loop_p.def_impl(_run_compiled)
mlir.register_lowering(loop_p, mlir.lower_fun(_run, multiple_results=True))
