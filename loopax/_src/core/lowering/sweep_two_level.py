"""A reverse sweep over blocks: `saved` holds the state at the start of each.

Block by block, from the last to the first, the steps of one block are evaluated again. What they store, their states or
records of residuals, is then read on the way back.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax._src.core.jaxpr.util import stacked
from loopax._src.core.lowering.sweep_common import Bodies, RowOf, Track
from loopax._src.core.lowering.while_loop import LoopState, RowLoop, Step, read, write
from loopax._src.jax_internals import unwritten
from loopax._src.schedule.saving import Blocks


class TwoLevelState(NamedTuple):
    """The state of a running reverse sweep."""

    block: Any  # the number of the block whose turn it is
    stored: list[Any]  # room for what the steps of one block store
    progress: LoopState  # the backward walk


def sweep_blocks(
    saving: Blocks, track: Track, bodies: Bodies, _: Any, saved: list[Any], progress: LoopState
) -> LoopState:
    """Walk back through all blocks."""
    size = saving.size

    def one_block(at: TwoLevelState) -> TwoLevelState:
        start = track.row(at.block * size)
        length = jnp.minimum(track.num_steps - at.block * size, size)
        state = [read(s, at.block) for s in saved]
        stored = _replay_block(track.ahead, bodies, start, length, state, at.stored)
        progress = _walk_back(track.ahead, bodies, start, length, stored, at.progress)
        return TwoLevelState(at.block - 1, stored, progress)

    stored = [unwritten(stacked(aval, size)) for aval in bodies.stored_avals]
    last_block = (track.num_steps + (size - 1)) // size - 1
    at = TwoLevelState(last_block, stored, progress)
    return lax.while_loop(lambda at: at.block >= 0, one_block, at).progress


def _replay_block(
    ahead: RowLoop, bodies: Bodies, start: Any, length: Any, state: list[Any], stored: list[Any]
) -> list[Any]:
    """Evaluate the steps of one block again, into `stored`; the last state needs no step after it."""
    steps = bodies.replay_steps(ahead, start, written=lambda position: position)
    progress = LoopState(state, stored, jnp.int32(0))
    progress = RowLoop(reverse=False, unroll=ahead.unroll).run(
        steps, progress, length if bodies.records else length - 1
    )
    if bodies.records:
        return progress.ys
    return [write(s, length - 1, value) for s, value in zip(progress.ys, progress.carry, strict=True)]


def _walk_back(
    ahead: RowLoop, bodies: Bodies, start: Any, length: Any, stored: list[Any], progress: LoopState
) -> LoopState:
    """Walk one block backward.

    Positions count from the block's start: XLA then has one number less to carry into every fused
    operation, which decides whether a tiny loop is compiled as one function.
    """

    def make(backward: Callable[..., Any], row_of: RowOf) -> Callable[[Sequence[Any]], Step]:
        return lambda consts: (
            lambda position, carry: backward(row_of(position), consts, carry, [read(s, position) for s in stored])
        )

    steps = bodies.backward.steps(make, ahead, start)
    progress = progress._replace(position=length - 1)
    return RowLoop(reverse=True, unroll=ahead.unroll).run(steps, progress, jnp.int32(-1))
