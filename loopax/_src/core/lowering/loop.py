"""How a loop is compiled."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import schedule
from loopax._src.core.ir.annotations import UNKNOWN, Reports
from loopax._src.core.ir.loop import EMPTY_SLOT, NO_STOP, Loop, result_avals
from loopax._src.core.ir.plan import Blocks, Saving, Slots
from loopax._src.core.jaxpr.types import nan_if, unvarying
from loopax._src.core.jaxpr.util import MOST_STEPS, flatten, num_bytes, split_list, trace
from loopax._src.core.lane_effects import acts, guarded
from loopax._src.core.lowering.rows import (
    NEVER,
    Body,
    LoopState,
    RowLoop,
    Steps,
    Watch,
    put,
    read,
    stored_first,
    while_asked,
    write,
)
from loopax._src.core.masking import common_rows
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun, unwritten, vary_like, where, zeros
from loopax._src.settings import calibration

# A loop that saves some of its carries: at the start of every block, in so many slots, or only the last one.


class Saver(NamedTuple):
    """The state of a loop that saves."""

    state: LoopState
    saved: list[Any]  # room for the carries
    checkpoint_rows: Any  # int32[slots]: before which they were saved, or `EMPTY_SLOT`; None where `plan` says it
    plan: Any  # what the schedule remembers


def run_saving(
    saving: Saving, loop: Loop, walk: RowLoop, steps: Steps, state: LoopState, end: Any, room: list[Any]
) -> tuple[LoopState, list[Any]]:
    """Walk until `end`, or until the predicate is False; returns what was saved, in `room`, and before which rows."""
    start, counted = state.position, walk._replace(limited=True)
    if not isinstance(saving, Blocks | Slots):  # the last carry alone
        state = counted.run(steps, state, end)
        state = state if walk.limited else _poisoned(state)
        return state, [*(x[None] for x in loop.saved_of(state.carry)), start[None]]

    # What a schedule decides, where so many steps remain at most: the room for the current carry, steps to the next,
    # and the new plan. Of blocks, the plan is the number of the block; of a known length, how many slots are in use
    # and the division of the steps that remain.
    def decide(saver: Saver, remain: Any) -> tuple[Any, Any, Any]:
        if isinstance(saving, Blocks):
            return saver.plan, saving.size, saver.plan + 1
        if saving.length_known:
            used, division = saver.plan
            free = saving.count - used
            length, _, ahead = division.divided(jnp.maximum(remain, 2), free)
            return used, jnp.where(free == 1, remain, length), (used + 1, ahead)
        step = walk.distance(start, saver.state.position)
        if calibration().look:  # the host would be asked about branches
            plan, slot, _ = schedule.store_if_due(saver.plan, step, saving.count)
            return slot, schedule.due_in(plan) - step, plan
        plan, slot, length = schedule.store(saver.plan, step)
        return slot, length, plan

    def goes_on(saver: Saver) -> Any:
        remain = walk.distance(saver.state.position, end) > 0
        return remain & saver.state.carry[0] if loop.predicated else remain

    # Before: a row whose carry is to be saved. After: the carry is saved, and the loop has walked to the next such row.
    def stretch(saver: Saver) -> Saver:
        state, saved, checkpoint_rows, _ = saver
        remain = walk.distance(state.position, end)
        place, length, plan = decide(saver, remain)
        pairs = zip(saved, loop.saved_of(state.carry), strict=True)
        saved = [write(buffer, place, value) for buffer, value in pairs]
        saved, carry = stored_first(saved, state.carry)
        if checkpoint_rows is not None:
            checkpoint_rows = write(checkpoint_rows, place, state.position)
        next_stop = walk.advance(state.position, jnp.minimum(length, remain))
        return Saver(counted.run(steps, state._replace(carry=carry), next_stop), saved, checkpoint_rows, plan)

    plan, rows = _begun(saving, walk, start, end)
    state, saved, rows, plan = while_asked(goes_on, stretch, Saver(state, room, rows, plan))
    if isinstance(saving, Blocks):
        rows = start[None]
    else:
        rows = _in_order(plan, saving.count, walk, start) if rows is None else jnp.append(rows, plan[0])
    return state if walk.limited else _poisoned(state), [*saved, rows]


def _begun(saving: Blocks | Slots, walk: RowLoop, start: Any, end: Any) -> tuple[Any, Any]:
    """What a schedule remembers, and the rows of its slots; None: they follow from that."""
    if isinstance(saving, Blocks):
        return jnp.int32(0), None
    if not saving.length_known:
        begin = schedule.start_in_one_array if calibration().look else schedule.start
        return begin(saving.count), None
    division = schedule.divisions(jnp.maximum(walk.distance(start, end), 0), jnp.int32(saving.count))
    return (jnp.int32(0), division), jnp.full(saving.count, EMPTY_SLOT, jnp.int32)


def _run_online(
    saving: Slots, loop: Loop, walk: RowLoop, steps: Steps, state: LoopState, end: Any, room: list[Any]
) -> tuple[LoopState, list[Any]]:
    """As `run_saving` without a known length, in one loop: each step saves its carry, or writes what is there.

    Most stretches are one or two steps, and the host of a GPU would look at the condition of another loop for each.
    """
    start, sizes = state.position, [len(state.carry), len(room)]

    def take(body: Callable[..., Any], row: Any, position: Any, values: list[Any]) -> tuple[list[Any], list[Any]]:
        carry, saved, (remembered,) = split_list(values, sizes)
        remembered, slot, is_due = schedule.store_if_due(remembered, walk.distance(start, position), saving.count)
        saved = [put(x, slot, is_due, value) for x, value in zip(saved, loop.saved_of(carry), strict=True)]
        carry, y = steps.take(body, row, position, carry)
        return [*carry, *saved, remembered], y

    remembered = schedule.start_in_one_array(saving.count)
    done = walk._replace(limited=True).run(
        steps._replace(take=take), state._replace(carry=[*state.carry, *room, remembered]), end
    )
    carry, saved, (remembered,) = split_list(done.carry, sizes)
    state = done._replace(carry=carry)
    return state if walk.limited else _poisoned(state), [*saved, _in_order(remembered, saving.count, walk, start)]


def _in_order(plan: Any, count: int, walk: RowLoop, start: Any) -> Any:
    """The rows before which carries were saved, in order, with those of unused slots last; then their slots.

    The first two rows, or fields, of what the schedule remembers say them for so many slots.
    """
    stored, slots = (x[:count] for x in plan[:2])
    rows = jnp.where(stored < 0, EMPTY_SLOT, walk.advance(start, stored))
    is_one_array = not isinstance(plan, schedule.Online)
    unused = schedule.unused_in(plan) if is_one_array else jnp.sum(stored < 0, dtype=jnp.int32)
    twice = jnp.tile(jnp.stack([rows, slots]), 2)
    in_order = lax.dynamic_slice_in_dim(twice, unused, rows.size, 1).reshape(-1)
    # XLA would compute it once more in each kernel that reads it.
    return lax.optimization_barrier(jnp.append(in_order, count - unused))


def _run_known_blocks(
    saving: Blocks, loop: Loop, walk: RowLoop, steps: Steps, state: LoopState, end: Any, room: list[Any]
) -> tuple[LoopState, list[Any]]:
    """As `run_saving`, of blocks whose numbers of steps are known: all loops have lengths that a compiler can know.

    A GPU runs such loops without a look at their conditions from the host.
    """
    start, size = state.position, saving.size
    num_steps = walk.distance(start, end)
    number = num_steps // size  # of blocks without the last one, if that has fewer steps

    def one_block(length: Any, at: tuple[Any, LoopState, list[Any]]) -> tuple[Any, LoopState, list[Any]]:
        block, state, saved = at
        first = walk.advance(start, block * size)
        saved = [write(buffer, block, value) for buffer, value in zip(saved, loop.saved_of(state.carry), strict=True)]
        counted = RowLoop(reverse=False, unroll=walk.unroll)
        within = steps._replace(ahead=walk, start=first)
        end = jnp.asarray(length, jnp.int32)  # made here, a number is one that XLA knows
        return block + 1, counted.run(within, state._replace(position=jnp.int32(0)), end), saved

    blocks = lax.while_loop(lambda at: at[0] < number, partial(one_block, size), (jnp.int32(0), state, room))
    if not saving.are_even:
        blocks = one_block(num_steps - number * size, blocks)
    _, state, saved = blocks
    return state._replace(position=walk.advance(start, num_steps)), [*saved, start[None]]


def _poisoned(state: LoopState) -> LoopState:
    """NaN where a loop without a bound is not done after all steps that can be counted, where it has to stop saving."""
    cut = (state.position == MOST_STEPS) & state.carry[0]

    return state._replace(carry=[nan_if(cut, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in state.carry])


def evaluate_loop(low: Any, high: Any, *operands: Any, **params: Any) -> list[Any]:
    """The meaning of `loop_p` as a function of JAX, by which it is run and compiled.

    Operands are `low, high, *consts, *carry, *xs`, results `num_steps, *carry, *ys, *saved, checkpoint_rows`.
    """
    loop, low, high = Loop(**params), unvarying(low), unvarying(high)
    walk = partial(_walk if loop.stop is None else _walk_before_stop, loop)
    if loop.reporting is None:
        return walk(None, low, high, operands)
    reports = Reports.begin(loop.reporting, UNKNOWN if loop.predicated else jnp.maximum(high - low, 0))
    results = walk(reports, low, high, operands)
    reports.end(results[0])
    return results


def _walk_before_stop(loop: Loop, reports: Reports | None, low: Any, high: Any, operands: Sequence[Any]) -> list[Any]:
    """Walk, and walk again up to the step that broke, if one did: so no carry is copied for the case that one does.

    Both walks are one loop around one program, which takes one step at a time: none follows one that broke. The second
    reports nothing and repeats no effects without results.
    """
    consts, carry, xs = map(list, loop.inputs(operands))
    body, stop = loop.body, loop.stop
    assert stop is not None
    loop, first = loop._replace(unroll=1), high - 1 if loop.reverse else low
    if acts(body):  # Before: (row, *inputs) -> outputs. After: (row, whether they happen, *inputs) -> outputs
        happening = guarded(body, when="effects")
        avals = [body.in_avals[0], jax.ShapeDtypeStruct((), bool), *body.in_avals[1:]]
        body = trace(lambda row, is_first, *inputs: happening(is_first, row, *inputs), avals)
        loop = loop._replace(body=body, num_consts=loop.num_consts + 1)
    is_alone = carry[stop].ndim == 0  # in a batch, each lane ends before its own
    has_end = loop.bound is not None or loop.saving is not None
    if is_alone and not has_end:
        loop = loop._replace(body=_ending_before_stop(loop))

    def turn(state: tuple[Any, ...]) -> tuple[Any, ...]:
        _, is_first, begun, before = state
        flag = [is_first] * (loop.num_consts - len(consts))
        start = [*carry[:stop], *begun, *carry[stop + len(begun) :]]
        start[0] &= loop.is_before_stop(first, start)
        limits = _before_stop(loop, begun[0], low, high) if is_alone and has_end else (low, high)
        results = _walk(loop, reports, *limits, [*flag, *consts, *start, *xs], before, is_first)
        found = [results[1 + i] for i in loop.stops]
        return is_first & jnp.any(found[0] != begun[0]), jnp.zeros_like(is_first), found, results

    yes, none = vary_like(jnp.ones((), bool), jax.typeof(carry[stop])), result_avals(loop)
    room = [zeros(none.num_steps), *carry, *map(unwritten, (*none.ys, *none.saved)), *map(zeros, none.checkpoint_rows)]
    state = lax.while_loop(lambda state: state[0], turn, (yes, yes, [carry[i] for i in loop.stops], room))
    _, _, found, results = state
    return _without_broken_rows(loop, low, high, found[0], results)


def _ending_before_stop(loop: Loop) -> ClosedJaxpr:
    """The body of a loop without an end, whose condition ends it: it reads the `stop` in its carry."""
    function, stop, walk = jaxpr_as_fun(loop.body), loop.carry_range[loop.stops[0]], RowLoop(False, limited=False)

    def body(*inputs: Any) -> list[Any]:
        go, *out = function(*inputs)
        return [go & (walk.following(inputs[0]) != inputs[stop]), *out]

    return trace(body, loop.body.in_avals)


def _before_stop(loop: Loop, stop: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The limits of a loop that ends before this row, if it has one."""
    has_stop = stop != NO_STOP[0]
    return (jnp.where(has_stop, stop + 1, low), high) if loop.reverse else (low, jnp.where(has_stop, stop, high))


def _without_broken_rows(loop: Loop, low: Any, high: Any, stop: Any, results: list[Any]) -> list[Any]:
    """The results with zeros in the row that the first walk may have written beyond the second."""
    if not loop.bound:
        return results
    out = loop.results(results)
    row = high - 1 - out.num_steps if loop.reverse else low + out.num_steps
    has_broken = jnp.any(stop >= 0)
    is_left = has_broken & (low <= row) & (row < high)
    row = jnp.clip(row, 0, loop.bound - 1)
    pairs = zip(out.ys, loop.output_avals.ys, strict=True)
    ys = [write(y, row, where(is_left, zeros(aval), read(y, row))) for y, aval in pairs]
    return out._replace(ys=ys).leaves


def _walk(
    loop: Loop,
    reports: Reports | None,
    low: Any,
    high: Any,
    operands: Sequence[Any],
    before: Sequence[Any] | None = None,
    is_first: Any = True,
) -> list[Any]:
    """The results of a walk. `before`: results of another one, whose rows are overwritten."""
    consts, carry, xs = map(list, loop.inputs(operands))
    if loop.bound == 0:  # there are no rows that a step could read
        _, _, *others = result_avals(loop)
        return [jnp.int32(0), *carry, *map(zeros, flatten(others))]
    # A loop of one step or none fills no constants outside: it has no second step for which they would stay the same.
    if loop.bound == 1:
        body = Body.plain(loop.body, consts)
    else:
        body = Body.of(loop.body, consts, common_rows(loop.body, consts), loop.num_carry)

    def take(body: Callable[..., Any], row: Any, _: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        out = loop.outputs(body(row, *carry, *(read(x, row) for x in xs)))
        return list(out.carry), list(out.ys)

    steps = Steps(body, take)
    walk = RowLoop(loop.reverse, loop.unroll, loop.predicated, loop.bound is not None or not loop.predicated)
    start = walk.first(low, high)
    if before is None:
        none = result_avals(loop)
        before = none._replace(ys=map(unwritten, none.ys), saved=map(unwritten, none.saved)).leaves
    room = loop.results(before)
    state = LoopState(carry, list(room.ys), start)
    if reports is not None and loop.bound != 1:
        watch = Watch(reports, start, loop.active_count_index)
        walk = walk._replace(watch=watch)
        due = watch.first_due(walk._replace(limited=True) if loop.saving else walk)
        never = MOST_STEPS if (walk.limited or loop.saving) and not loop.reverse else NEVER
        state = state._replace(due=due if is_first is True else jnp.where(is_first, due, never))
    end = low - 1 if loop.reverse else high
    if loop.saving:
        is_known = isinstance(loop.saving, Blocks) and loop.saving.are_known and walk.watch is None
        is_online = isinstance(loop.saving, Slots) and not loop.saving.length_known
        if is_online and calibration().begins_late(num_bytes(loop.output_avals.carry)):
            run_saved: Callable[..., Any] = _run_online
        else:
            run_saved = _run_known_blocks if is_known else run_saving
        state, saved = run_saved(loop.saving, loop, walk, steps, state, end, room.saved)
    elif loop.bound == 1:
        run = walk.run_and_discard if loop.may_discard else walk.run_at_most_once
        state, saved = run(steps, state, end), []
    else:
        state, saved = walk.run(steps, state, end), []
    return [walk.distance(start, state.position), *state.carry, *state.ys, *saved]
