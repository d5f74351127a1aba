"""Chunks of a queue's rounds: what a host starts, and looks at when they are done.

`work_queue.py` runs all rounds in one program, since it has all items. Here, a host has some items at a time. It gives
a chunk rows of items, one row for each round::

    for row of items, until so many steps are taken:
        outputs of finished lanes -> a row of results, with the numbers of their items
        row -> these lanes, or others that are free
        while enough lanes are busy: step all lanes
    outputs of finished lanes -> one more row of results

A row has no more items than there are lanes without a step to take when its round begins. The host makes sure of that
for the first row. After a round, as many lanes have none as a row has places.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.jaxpr.util import stacked
from loopax._src.core.lowering.while_loop import write
from loopax._src.core.programs.split_at_loop import Stepper, split_at_loop
from loopax._src.core.programs.work_queue import NO_ITEM, Lane, Queue, exchange
from loopax._src.jax_internals import ClosedJaxpr, zeros
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

    finished: Any  # int32[rounds + 1, places]: numbers of items that are done, NO_ITEM where there is none
    outputs: list[Any]  # (rounds + 1, places, ...)
    rows: Any  # of items that were begun
    iterations: Any  # in which all lanes were stepped
    useful: Any  # steps of lanes in them
    free: Any  # lanes without an item at the end


def queue_for(program: ClosedJaxpr, shared: Any, item_avals: Any, lanes: int, places: int) -> Queue:
    """Lanes for a program (*shared, *item) -> outputs with one loop in it."""
    return Queue(Stepper(split_at_loop(program, _refuse)), shared, item_avals, lanes, places)


def run_chunk(queue: Queue, state: Lane, rows: ItemRows, most: Any) -> tuple[Lane, Found]:
    """Run rounds until so many steps are taken, or no row is left."""

    def goes_on(at: tuple[Lane, Found]) -> Any:
        state, found = at
        is_left = jnp.any(state.item != NO_ITEM) | (found.rows < rows.filled)
        return (found.rows < rows.count) & is_left & (found.iterations < most)

    def one_round(at: tuple[Lane, Found]) -> tuple[Lane, Found]:
        state, found = at
        row = found.rows
        state, found = _exchange(queue, state, found, rows.numbers[row], [x[row] for x in rows.inputs])
        has_next = rows.more | (row + 1 < rows.filled)
        with_item = jnp.sum(state.item != NO_ITEM, dtype=jnp.int32)
        leave = jnp.where(has_next, queue.lanes - queue.part, jnp.maximum(with_item - rows.wanted, 0))
        state, iterations, useful = _step(queue, state, leave, most - found.iterations)
        return state, found._replace(
            rows=row + 1, iterations=found.iterations + iterations, useful=found.useful + useful
        )

    state, found = lax.while_loop(goes_on, one_round, (state, _nothing(queue, rows.numbers.shape[0] + 1)))
    none = [zeros(stacked(aval, queue.part)) for aval in queue.item_avals]
    state, found = _exchange(queue, state, found, jnp.full(queue.part, NO_ITEM, jnp.int32), none)
    return state, found._replace(free=jnp.sum(state.item == NO_ITEM, dtype=jnp.int32))


def _nothing(queue: Queue, rows: int) -> Found:
    places, zero = (rows, queue.part), jnp.int32(0)
    outputs = [zeros(stacked(stacked(aval, queue.part), rows)) for aval in queue.stepper.parts.after.out_avals]
    return Found(jnp.full(places, NO_ITEM, jnp.int32), outputs, zero, zero, zero, zero)


def _exchange(queue: Queue, state: Lane, found: Found, numbers: Any, inputs: list[Any]) -> tuple[Lane, Found]:
    """Results of finished lanes go to the next row, and items to these and to other free lanes."""
    state, finished, outputs = exchange(queue, state, numbers, inputs)
    return state, found._replace(
        finished=found.finished.at[found.rows].set(finished),
        outputs=[write(x, found.rows, new) for x, new in zip(found.outputs, outputs, strict=True)],
    )


def _step(queue: Queue, state: Lane, leave: Any, most: Any) -> tuple[Lane, Any, Any]:
    """Step all lanes until at most so many are busy; also how often, and how many steps lanes took."""

    def goes_on(at: tuple[Lane, Any]) -> Any:
        state, iterations = at
        return (queue.num_busy(state) > leave) & (iterations < most)

    def step(at: tuple[Lane, Any]) -> tuple[Lane, Any]:
        state, iterations = at
        return jax.vmap(queue.step)(state), iterations + 1

    after, iterations = lax.while_loop(goes_on, step, (state, jnp.int32(0)))
    useful = jnp.sum(after.inside.num_steps - state.inside.num_steps, dtype=jnp.int32)
    return after, iterations, useful


def _refuse(loops: int) -> Exception:
    return ValueError(lanes_stream_message(loops))
