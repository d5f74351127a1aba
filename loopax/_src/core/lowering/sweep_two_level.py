"""A reverse sweep over blocks: `saved` holds the state at the start of each.

Block by block, from the last to the first, the states of one block are evaluated again and then read.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.util import stacked
from loopax._src.core.lowering.sweep_common import Bodies, RowOf, Track
from loopax._src.core.lowering.while_loop import LoopState, RowLoop, Step, read, write
from loopax._src.jax_internals import zeros


class TwoLevelState(NamedTuple):
    """The state of a running reverse sweep."""

    block: Any  # the number of the block whose turn it is
    states: list[Any]  # room for the states of one block
    progress: LoopState  # the backward walk


def sweep_blocks(
    sweep: ReverseSweep, track: Track, bodies: Bodies, size: int, saved: list[Any], progress: LoopState
) -> LoopState:
    """Walk back through all blocks."""

    def one_block(at: TwoLevelState) -> TwoLevelState:
        start = track.row(at.block * size)
        length = jnp.minimum(track.num_steps - at.block * size, size)
        state = [read(s, at.block) for s in saved]
        states = _states_of_block(track.ahead, bodies, start, length, state, at.states)
        progress = _walk_back(track.ahead, bodies, start, length, states, at.progress)
        return TwoLevelState(at.block - 1, states, progress)

    states = [zeros(stacked(aval, size)) for aval in sweep.forward_avals.state]
    last_block = (track.num_steps + (size - 1)) // size - 1
    at = TwoLevelState(last_block, states, progress)
    return lax.while_loop(lambda at: at.block >= 0, one_block, at).progress


def _states_of_block(
    ahead: RowLoop, bodies: Bodies, start: Any, length: Any, state: list[Any], states: list[Any]
) -> list[Any]:
    """Evaluate the states of one block again, into `states`; the last state needs no step after it."""

    def make(forward: Callable[..., Any], row_of: RowOf) -> Callable[[Sequence[Any]], Step]:
        return lambda consts: lambda position, state: (forward(row_of(position), consts, state), state)

    steps = bodies.forward.steps(make, ahead, start, written=lambda position: position)
    progress = LoopState(state, states, jnp.int32(0))
    progress = RowLoop(reverse=False, unroll=ahead.unroll).run(steps, progress, length - 1)
    return [write(s, length - 1, value) for s, value in zip(progress.ys, progress.carry, strict=True)]


def _walk_back(
    ahead: RowLoop, bodies: Bodies, start: Any, length: Any, states: list[Any], progress: LoopState
) -> LoopState:
    """Walk one block backward.

    Positions count from the block's start: XLA then has one number less to carry into every fused
    operation, which decides whether a tiny loop is compiled as one function.
    """

    def make(backward: Callable[..., Any], row_of: RowOf) -> Callable[[Sequence[Any]], Step]:
        return lambda consts: (
            lambda position, carry: backward(row_of(position), consts, carry, [read(s, position) for s in states])
        )

    steps = bodies.backward.steps(make, ahead, start)
    progress = progress._replace(position=length - 1)
    return RowLoop(reverse=True, unroll=ahead.unroll).run(steps, progress, jnp.int32(-1))
