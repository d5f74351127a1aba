"""A reverse sweep over blocks: `saved` holds the state at the start of each.

Block by block, from the last to the first, the states of one block are evaluated again and then read.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax._compat import is_on_one_device, zeros
from loopax.core.jaxprs import stacked
from loopax.core.replay import Replay
from loopax.core.storage import Checkpoints
from loopax.core.sweep import Bodies, Track
from loopax.core.walk import Progress, Step, Steps, Walk, read, write


class Sweep(NamedTuple):
    """The state of a running reverse sweep."""

    block: Any  # the number of the block whose turn it is
    states: list[Any]  # room for the states of one block
    progress: Progress  # the backward walk


def sweep_blocks(
    static: Replay, track: Track, bodies: Bodies, size: int, saved: list[Any], progress: Progress
) -> Progress:
    """Walk back through all blocks."""

    def one_block(sweep: Sweep) -> Sweep:
        start = track.row(sweep.block * size)
        length = jnp.minimum(track.num_steps - sweep.block * size, size)
        state = [read(s, sweep.block) for s in saved]
        states = _states_of_block(track.ahead, bodies, start, length, state, sweep.states)
        progress = _walk_back(track.ahead, bodies, start, length, states, sweep.progress)
        return Sweep(sweep.block - 1, states, progress)

    avals = [stacked(aval, size) for aval in static.forward_avals[1]]
    in_turn = isinstance(static.storage, Checkpoints) and static.storage.in_turn
    states = [_room(aval, progress.carry) if in_turn else zeros(aval) for aval in avals]
    last_block = (track.num_steps + (size - 1)) // size - 1
    sweep = Sweep(last_block, states, progress)
    return lax.while_loop(lambda sweep: sweep.block >= 0, one_block, sweep).progress


def _room(aval: Any, carry: list[Any]) -> Any:
    """An array that is written before it is read.

    It is made from the carry, so that it cannot be made before its sweep begins: sweeps that run one after another
    then use the same memory. Of a constant, XLA makes all of them at the start. For a sweep alone it does not pay,
    since XLA then also copies more (a heat equation took three times as long).
    """
    sources = [x for x in carry if x.size and jnp.issubdtype(x.dtype, jnp.floating) and is_on_one_device(x)]
    if not sources:
        return zeros(aval)
    first = lax.index_in_dim(sources[0].ravel(), 0, keepdims=False)
    return zeros(aval) + (first - first).astype(aval.dtype)


def _states_of_block(
    ahead: Walk, bodies: Bodies, start: Any, length: Any, state: list[Any], states: list[Any]
) -> list[Any]:
    """Evaluate the states of one block again, into `states`; the last state needs no step after it."""

    def row_of(position: Any) -> Any:
        return ahead.advance(start, position)

    def with_consts(consts: Sequence[Any]) -> Step:
        return lambda position, state: (bodies.forward(row_of(position), consts, state), state)

    steps = Steps(with_consts, bodies.consts, lend=bodies.lend_at(row_of))
    progress = Progress(state, states, jnp.int32(0))
    progress = Walk(reverse=False, unroll=ahead.unroll).run(steps, progress, length - 1)
    return [write(s, length - 1, value) for s, value in zip(progress.ys, progress.carry, strict=True)]


def _walk_back(ahead: Walk, bodies: Bodies, start: Any, length: Any, states: list[Any], progress: Progress) -> Progress:
    """Walk one block backward.

    Positions count from the block's start: XLA then has one number less to carry into every fused
    operation, which decides whether a tiny loop is compiled as one function.
    """

    def row_of(position: Any) -> Any:
        return ahead.advance(start, position)

    def with_consts(consts: Sequence[Any]) -> Step:
        def step(position: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
            return bodies.backward(row_of(position), consts, carry, [read(s, position) for s in states])

        return step

    steps = Steps(with_consts, bodies.consts, row_of, bodies.lend_at(row_of))
    progress = progress._replace(position=length - 1)
    return Walk(reverse=True, unroll=ahead.unroll).run(steps, progress, jnp.int32(-1))
