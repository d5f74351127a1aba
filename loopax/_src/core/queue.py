"""Any number of items through a fixed number of lanes, which take the next items as they finish.

The program that is run for each item holds one loop. One round of the queue takes the results of some lanes that have
finished, gives them the next items, and steps all lanes until as many have finished again::

    for chunk of items:                      # and, at the end, for as many empty chunks as there are lanes
        outputs of finished lanes -> a row of results, with the numbers of their items
        chunk -> these lanes
        while enough lanes are busy: step all lanes

The rounds are a loop over rows of items and of results, so neither is stored for a gradient, and the memory for one
does not depend on how many rounds there are.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.batching.groups import active_first, run_function, take
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.loop import Loop, asked_as
from loopax._src.core.ir.plan import Checkpoints
from loopax._src.core.jaxpr.util import padded, split_list, stacked
from loopax._src.core.lowering.rows import write
from loopax._src.core.nest import Nest, cut_at_loop
from loopax._src.core.nested_lanes import Inside, Program, at_most_once, goes_on, nowhere
from loopax._src.jax_internals import ClosedJaxpr, keep_bits, on_device, where, zeros

# A round takes the results of one lane in so many. With more lanes in a round fewer would be busy, with fewer lanes
# items would begin and end more often.
PART = 8
# The states of all lanes that are kept for a gradient.
KEPT_ROUNDS = 16
NO_ITEM = -1


class Lane(NamedTuple):
    """What a lane is working on."""

    item: Any  # its number, or NO_ITEM
    inputs: list[Any]
    inside: Inside


class Queue(NamedTuple):
    """Lanes and the program of an item: (*shared, *item) -> outputs."""

    program: Nest  # with one loop
    shared: Sequence[Any]
    item_avals: Sequence[Any]
    lanes: int
    part: int  # lanes that take items in a round

    def empty(self) -> Lane:
        """Lanes without items."""
        one = Lane(jnp.int32(NO_ITEM), list(map(zeros, self.item_avals)), nowhere(self.program))
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.lanes, *x.shape)), one)

    def is_busy(self, lane: Lane) -> Any:
        """Whether a lane has steps to take."""
        return (lane.item != NO_ITEM) & goes_on(self.loop, lane.inside.loops[0])

    def num_busy(self, state: Lane) -> Any:
        """How many of all lanes are."""
        return jnp.sum(jax.vmap(self.is_busy)(state), dtype=jnp.int32)

    @property
    def loop(self) -> Loop:
        """The loop in the program."""
        return self.program.loops[0].loop

    def begin(self, item: Any, inputs: list[Any], old: Inside) -> Lane:
        """A lane with its next item."""
        return Lane(item, inputs, self._program(inputs, old).begin(item != NO_ITEM).at)

    def _program(self, inputs: list[Any], at: Inside) -> Program:
        return Program(self.program, lambda: [*self.shared, *inputs], at)

    def step(self, lane: Lane) -> Lane:
        """One step, if the lane has one to take."""
        return lane._replace(inside=self._program(lane.inputs, lane.inside).advance(self.is_busy(lane)).at)

    def outputs(self, lane: Lane) -> list[Any]:
        """The results of a lane, zeros where it has no item or is not done with it."""
        done = (lane.item != NO_ITEM) & ~goes_on(self.loop, lane.inside.loops[0])
        nothing = list(map(zeros, self.program.blocks[-1].out_avals))
        return at_most_once(done, lambda *_: self._program(lane.inputs, lane.inside).outputs(), nothing)


def run_queue(
    program: ClosedJaxpr, shared: Sequence[Any], items: Sequence[Any], num_items: int, lanes: int
) -> list[Any]:
    """The outputs of the program for all items."""
    lanes = min(lanes, num_items)
    part = max(lanes // PART, 1)
    item_avals = [jax.typeof(x[0]) for x in items]
    otherwise = ", or use `jax.lax.map(f, xs, batch_size=...)`, which needs no loop."
    split = cut_at_loop(program, "lanes_map(f, ...): f must hold exactly one loop of loopax, and holds", otherwise)
    queue = Queue(split, shared, item_avals, lanes, part)
    full, drained = -(-num_items // part), -(-lanes // part)
    numbers = jnp.arange((full + drained) * part, dtype=jnp.int32)
    numbers = jnp.where(numbers < num_items, numbers, NO_ITEM)
    # Before: [items, ...] -> After: [rounds, items of a round, ...], with zeros behind the items
    rounds = full + drained
    rows = [padded(x, rounds * part - len(x)).reshape(rounds, part, *x.shape[1:]) for x in [numbers, *items]]
    start, treedef = jax.tree.flatten(queue.empty())

    def one_round(_: Any, *values: Any) -> list[Any]:
        leaves, (numbers, *inputs) = split_list(values, [len(start)])
        state, finished, outputs = exchange(queue, treedef.unflatten(leaves), numbers, inputs)
        # Step all lanes while too few of them are free for the next round.
        with_item = jnp.sum(state.item != NO_ITEM, dtype=jnp.int32)
        is_last = jnp.any(numbers == NO_ITEM)  # no items are left: what follows only takes results
        leave = jnp.where(is_last, jnp.maximum(with_item - part, 0), lanes - part)

        def step(_: Any, __: Any, *leaves: Any) -> list[Any]:
            state = jax.vmap(queue.step)(treedef.unflatten(leaves))
            return [queue.num_busy(state) > leave, *jax.tree.leaves(state)]

        loop = queue.loop  # whose bound is one for a round, too: after so many steps all lanes are done
        leaves = [queue.num_busy(state) > leave, *jax.tree.leaves(state)]
        stepped = run_function(step, leaves, bound=loop.bound, predicated=True, **asked_as(loop))
        return [*stepped.carry[1:], finished, *outputs]

    kind = Decided(Checkpoints(KEPT_ROUNDS, always_to_bound=True, reason="a queue of items"))
    watch = queue.loop.watch and queue.loop.watch.of_part()
    out = run_function(one_round, start, rows, bound=rounds, kind=kind, watch=watch)
    finished, *outputs = (y.reshape(-1, *y.shape[2:]) for y in out.ys)
    order = jnp.argsort(jnp.where(finished == NO_ITEM, num_items, finished))[:num_items]
    return [take(y, 0, order) for y in outputs]


def exchange(queue: Queue, state: Lane, numbers: Any, inputs: list[Any]) -> tuple[Lane, Any, list[Any]]:
    """Take results of finished lanes, and give items to these and to other free lanes.

    Returns the state, and the numbers of the items that are done with their outputs.
    """
    busy = jax.vmap(queue.is_busy)(state)
    is_done = (state.item != NO_ITEM) & ~busy
    rank = active_first(is_done, last=busy)[: queue.part]
    chosen = jax.tree.map(lambda x: take(x, 0, rank), state)
    done = is_done[rank]
    outputs = jax.vmap(queue.outputs)(chosen)
    left = chosen._replace(item=jnp.where(done, NO_ITEM, chosen.item))
    takes = left.item == NO_ITEM  # all of them, but at the end
    begun = jax.vmap(queue.begin)(jnp.where(takes, numbers, NO_ITEM), inputs, left.inside)

    def put(x: Any, new: Any, old: Any) -> Any:
        value = where(takes.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
        in_place = lambda x, value, rank: x.at[rank].set(value, unique_indices=True)  # noqa: E731
        return on_device(partial(keep_bits, in_place), x, value, rank)

    # The chosen lanes return to their places, each with its next item or as it was left.
    return jax.tree.map(put, state, begun, left), jnp.where(done, chosen.item, NO_ITEM), outputs


# Chunks of a queue's rounds: what a host starts, and looks at when they are done.
#
# `run_queue` runs all rounds in one program, since it has all items. Here, a host has some items at a time. It gives a
# chunk a row of items for each round, and the most steps. Behind the last round, one more row has the outputs of
# finished lanes.
#
# A row has no more items than there are lanes without a step to take when its round begins. The host makes sure of
# that for the first row. After a round, as many lanes have none as a row has places.


class ItemRows(NamedTuple):
    """Items for a chunk."""

    numbers: Any  # int32[rounds, places], NO_ITEM where there is none
    inputs: list[Any]  # (rounds, places, ...)
    filled: Any  # rows with items in them
    count: Any  # rounds: more than there are such rows where no items are left, and lanes are only waited for
    more: Any  # whether the host has more items
    wanted: Any  # lanes to wait for in a round that no items follow


class ChunkResults(NamedTuple):
    """What a chunk found."""

    finished: Any  # int32[rounds + 1, places]: numbers of items that are done, NO_ITEM where there is none
    outputs: list[Any]  # (rounds + 1, places, ...)
    rows: Any  # of items that were begun
    iterations: Any  # in which all lanes were stepped
    useful: Any  # steps of lanes in them
    free: Any  # lanes without an item at the end


def queue_for(program: ClosedJaxpr, shared: Any, item_avals: Any, lanes: int, places: int) -> Queue:
    """Lanes for a program (*shared, *item) -> outputs with one loop in it."""
    otherwise = ". Items without a loop need no lanes: `jax.vmap` takes as long for each."
    split = cut_at_loop(program, "lanes_stream(f, ...): f must hold exactly one loop of loopax, and holds", otherwise)
    return Queue(split, shared, item_avals, lanes, places)


def run_chunk(queue: Queue, state: Lane, rows: ItemRows, most: Any) -> tuple[Lane, ChunkResults]:
    """Run rounds until so many steps are taken, or no row is left."""

    def exchanged(state: Lane, found: ChunkResults, numbers: Any, inputs: list[Any]) -> tuple[Lane, ChunkResults]:
        # Results of finished lanes go to the next row, and items to these and to other free lanes.
        state, finished, outputs = exchange(queue, state, numbers, inputs)
        rows = [write(x, found.rows, new) for x, new in zip(found.outputs, outputs, strict=True)]
        return state, found._replace(finished=found.finished.at[found.rows].set(finished), outputs=rows)

    def goes_on(at: tuple[Lane, ChunkResults]) -> Any:
        state, found = at
        is_left = jnp.any(state.item != NO_ITEM) | (found.rows < rows.filled)
        return (found.rows < rows.count) & is_left & (found.iterations < most)

    def one_round(at: tuple[Lane, ChunkResults]) -> tuple[Lane, ChunkResults]:
        state, found = at
        row = found.rows
        state, found = exchanged(state, found, rows.numbers[row], [x[row] for x in rows.inputs])
        has_next = rows.more | (row + 1 < rows.filled)
        with_item = jnp.sum(state.item != NO_ITEM, dtype=jnp.int32)
        leave = jnp.where(has_next, queue.lanes - queue.part, jnp.maximum(with_item - rows.wanted, 0))
        after, iterations = lax.while_loop(
            lambda at: (queue.num_busy(at[0]) > leave) & (at[1] < most - found.iterations),
            lambda at: (jax.vmap(queue.step)(at[0]), at[1] + 1),
            (state, jnp.int32(0)),
        )
        useful = jnp.sum(after.inside.loops[0].num_steps - state.inside.loops[0].num_steps, dtype=jnp.int32)
        return after, found._replace(
            rows=row + 1, iterations=found.iterations + iterations, useful=found.useful + useful
        )

    places, zero = (rows.numbers.shape[0] + 1, queue.part), jnp.int32(0)
    outputs = [zeros(stacked(stacked(aval, places[1]), places[0])) for aval in queue.program.blocks[-1].out_avals]
    nothing = ChunkResults(jnp.full(places, NO_ITEM, jnp.int32), outputs, zero, zero, zero, zero)
    state, found = lax.while_loop(goes_on, one_round, (state, nothing))
    none = [zeros(stacked(aval, queue.part)) for aval in queue.item_avals]
    state, found = exchanged(state, found, jnp.full(queue.part, NO_ITEM, jnp.int32), none)
    return state, found._replace(free=jnp.sum(state.item == NO_ITEM, dtype=jnp.int32))
