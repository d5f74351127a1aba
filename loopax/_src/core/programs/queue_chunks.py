"""Chunks of a queue's rounds: what a host starts, and looks at when they are done.

`work_queue.py` runs all rounds in one program, since it has all items. Here, a host has some items at a time. It gives
a chunk rows of items, one row for each round::

    for row of items, until so many steps are taken:
        row -> free lanes
        while enough lanes are busy: step all lanes
        outputs of finished lanes -> a row of results

A row has no more items than there are lanes that are free when its round begins. The host makes sure of that for the
first row. After a round, as many lanes are free as a row has places.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.batching.compact.gather import active_first
from loopax._src.core.programs.split_at_loop import Stepper, split_at_loop
from loopax._src.core.programs.work_queue import NO_ITEM, Lane, Queue
from loopax._src.jax_internals import ClosedJaxpr
from loopax._src.messages import lanes_stream_message


class ItemRows(NamedTuple):
    """Items for a chunk."""

    numbers: Any  # int32[rounds, places], NO_ITEM where there is none
    inputs: list[Any]  # (rounds, places, ...)
    filled: Any  # rows with items in them
    count: Any  # rounds: more than there are such rows where no items are left, and lanes are only waited for
    more: Any  # whether the host has more items
    wanted: Any  # lanes to wait for in a round that no items follow


class Found(NamedTuple):
    """What a chunk found."""

    finished: Any  # int32[rounds, places]: numbers of items that are done, NO_ITEM where there is none
    num_steps: Any  # int32[rounds, places]: of these items
    outputs: list[Any]  # (rounds, places, ...)
    rows: Any  # of items that were begun
    free: Any  # lanes without an item
    iterations: Any  # in which all lanes were stepped
    useful: Any  # steps of lanes in them


class _Progress(NamedTuple):
    """Of a chunk, while it runs."""

    row: Any
    state: Lane
    found: Found


def queue_for(program: ClosedJaxpr, shared: Any, item_avals: Any, lanes: int, places: int) -> Queue:
    """Lanes for a program (*shared, *item) -> outputs with one loop in it."""
    return Queue(Stepper(split_at_loop(program, _refuse)), shared, item_avals, lanes, places)


def run_chunk(queue: Queue, state: Lane, rows: ItemRows, most: Any) -> tuple[Lane, Found]:
    """Run rounds until so many steps are taken, or no row is left."""

    def goes_on(at: _Progress) -> Any:
        is_left = jnp.any(at.state.item != NO_ITEM) | (at.row < rows.filled)
        return (at.row < rows.count) & is_left & (at.found.iterations < most)

    def one_round(at: _Progress) -> _Progress:
        state = _begin(queue, at.state, rows.numbers[at.row], [x[at.row] for x in rows.inputs])
        has_next = rows.more | (at.row + 1 < rows.filled)
        with_item = jnp.sum(state.item != NO_ITEM, dtype=jnp.int32)
        leave = jnp.where(has_next, queue.lanes - queue.part, jnp.maximum(with_item - rows.wanted, 0))
        state, iterations, useful = _step(queue, state, leave, most - at.found.iterations)
        state, finished, num_steps, outputs = _take(queue, state)
        old = at.found
        found = Found(
            old.finished.at[at.row].set(finished),
            old.num_steps.at[at.row].set(num_steps),
            [x.at[at.row].set(new) for x, new in zip(old.outputs, outputs, strict=True)],
            at.row + 1,
            jnp.sum(state.item == NO_ITEM, dtype=jnp.int32),
            old.iterations + iterations,
            old.useful + useful,
        )
        return _Progress(at.row + 1, state, found)

    start = _Progress(jnp.int32(0), state, _nothing(queue, rows.numbers.shape[0], state))
    end = lax.while_loop(goes_on, one_round, start)
    return end.state, end.found


def _nothing(queue: Queue, rounds: int, state: Lane) -> Found:
    places = (rounds, queue.part)
    outputs = [jnp.zeros((*places, *aval.shape), aval.dtype) for aval in queue.stepper.parts.after.out_avals]
    free = jnp.sum(state.item == NO_ITEM, dtype=jnp.int32)
    zero = jnp.int32(0)
    return Found(jnp.full(places, NO_ITEM, jnp.int32), jnp.zeros(places, jnp.int32), outputs, zero, free, zero, zero)


def _begin(queue: Queue, state: Lane, numbers: Any, inputs: list[Any]) -> Lane:
    """Give items to free lanes."""
    rank = active_first(state.item == NO_ITEM)[: queue.part]
    old = jax.tree.map(lambda x: x[rank], state)
    is_given = numbers != NO_ITEM
    begun = jax.vmap(queue.begin)(numbers, inputs, old)
    begun = jax.tree.map(lambda new, old: _where(is_given, new, old), begun, old)
    return _put(state, rank, begun)


def _step(queue: Queue, state: Lane, leave: Any, most: Any) -> tuple[Lane, Any, Any]:
    """Step all lanes until at most so many are busy; also how often, and how many lanes took a step."""

    def goes_on(at: Any) -> Any:
        _, iterations, _, busy = at
        return (busy > leave) & (iterations < most)

    def step(at: Any) -> Any:
        state, iterations, useful, busy = at
        state = jax.vmap(queue.step)(state)
        return state, iterations + 1, useful + busy, _num_busy(queue, state)

    start = (state, jnp.int32(0), jnp.int32(0), _num_busy(queue, state))
    return lax.while_loop(goes_on, step, start)[:3]


def _num_busy(queue: Queue, state: Lane) -> Any:
    return jnp.sum(jax.vmap(queue.is_busy)(state), dtype=jnp.int32)


def _take(queue: Queue, state: Lane) -> tuple[Lane, Any, Any, list[Any]]:
    """Take the results of finished lanes, which are free then."""
    is_done = (state.item != NO_ITEM) & ~jax.vmap(queue.is_busy)(state)
    rank = active_first(is_done)[: queue.part]
    chosen, done = jax.tree.map(lambda x: x[rank], state), is_done[rank]
    outputs = jax.vmap(queue.outputs)(chosen)
    finished = jnp.where(done, chosen.item, NO_ITEM)
    items = jnp.where(done, NO_ITEM, chosen.item)
    return state._replace(item=state.item.at[rank].set(items)), finished, chosen.inside.num_steps, outputs


def _put(state: Lane, rank: Any, values: Lane) -> Lane:
    return jax.tree.map(lambda x, new: x.at[rank].set(new, unique_indices=True), state, values)


def _where(chosen: Any, new: Any, old: Any) -> Any:
    return jnp.where(chosen.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def _refuse(loops: int) -> Exception:
    return ValueError(lanes_stream_message(loops))
