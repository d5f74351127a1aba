"""A batch of loops that stop at different steps, in lockstep.

Lanes share the row number, so rows of xs are never gathered. A lane is active while the row is within its own limits
(`low <= row < high`) and its own predicate is True; the batch goes on until no lane is, or until no more than some are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.core.batching.groups import run_function
from loopax._src.core.buffer_versions import returned
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lanes import Lockstep
from loopax._src.core.ir.loop import NOT_STARTED, Loop, LoopInputs, LoopOutputs, Outcome, run
from loopax._src.core.ir.plan import EveryResidual
from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.accumulate import summing_in_place
from loopax._src.core.jaxpr.dependence import is_arithmetic, is_elementwise, mixed_inputs, mixing_primitive
from loopax._src.core.jaxpr.types import Axis, axes_of, fill_axis, lane_avals, uniform_body
from loopax._src.core.jaxpr.util import (
    MOST_STEPS,
    Mask,
    either,
    flatten,
    map_leaves,
    refuse_collectives,
    split_list,
    stacked,
    trace,
    unflatten,
    weakly_cached,
)
from loopax._src.core.lane_effects import acts, guarded
from loopax._src.core.masking import (
    When,
    active_lanes,
    active_p,
    fill_inactive,
    over_lanes,
    pick,
    walk_row_p,
    walked_limits,
)
from loopax._src.core.own_arrays import kept_by_lanes
from loopax._src.core.stopped_loops import holds_stoppable, stop_suffices
from loopax._src.jax_internals import ClosedJaxpr, equations_in, jaxpr_as_fun

# One step of a batch of loops that stop at different times.
#
# A finished lane keeps its carry. What it computes meanwhile is thrown away, so it computes something harmless: its
# operands are filled with those of a lane that is still active (`core/masking.py`), so a loop inside the body
# never spins for a lane that is done, and no derivative meets what lies outside of the body's domain.


def lane_function(
    body: ClosedJaxpr,
    batched_inputs: Sequence[bool],
    axis: dict[str, Any],
    own: Mask = (),
    left: Sequence[int] = (),
    when: When = "always",
) -> Callable[..., list[Any]]:
    """`f(active, row, *operands)`: the body for all lanes; effects of finished lanes are suppressed.

    Such a lane goes on with the inputs that are its `own` as they are, and these outputs are `left` to it.
    """
    may_stay = when == "in_derivatives" and holds_stoppable(body)
    if acts(body) or any(own) or may_stay:
        return jax.vmap(guarded(body, own, left, when), in_axes=(0, None, *axes_of(batched_inputs)), out_axes=0, **axis)
    plain = jax.vmap(jaxpr_as_fun(body), in_axes=(None, *axes_of(batched_inputs)), out_axes=0, **axis)
    return lambda _, *operands: plain(*operands)


def step_lanes(
    body: ClosedJaxpr,
    axis: Axis,
    mapped: LoopInputs,
    when: When,
    may_idle: bool,
    active: Any,
    row: Any,
    inputs: LoopInputs,
) -> list[Any]:
    """One step of a body `(row, *consts, *carry, *x) -> (*carry, *y)` for all lanes.

    `mapped` says which inputs have lanes; `when`, whether finished lanes are given the operands of an active one
    ("always", "never", or "in_derivatives" alone); `may_idle`, whether there may be rows in which no lane is active.
    """
    consts, carry, xs = inputs
    body = summing_in_place(body, 1 + len(consts))
    own, left = kept_by_lanes(body, axis.size, mapped)
    function = lane_function(body, flatten(mapped), axis.arguments, own, left, when)
    # What other lanes see of a lane is its own: the key from which JAX draws for all (`core/jaxpr/dependence.py`).
    is_own = either(own, mixed_inputs(body))[1:]
    filled = unflatten(mapped, [has_lanes and not o for has_lanes, o in zip(flatten(mapped), is_own, strict=True)])
    consts = fill_inactive(active, consts, filled.consts, when)

    def step(carry: Sequence[Any]) -> list[Any]:
        # Before: operands of a finished lane are its own -> After: they are those of an active lane
        operands = fill_inactive(active, [*carry, *xs], [*filled.carry, *filled.xs], when)
        new_carry, ys = split_list(function(active, row, *consts, *operands), [len(carry)])
        # Before: results of that lane are an active one's -> After: its old carry, and zeros
        leaves = enumerate(zip(new_carry, carry, strict=True))
        return [
            *(new if k in left else pick(active, new, old) for k, (new, old) in leaves),
            *(pick(active, y, jaxi.zero(y.dtype)) for y in ys),
        ]

    if not may_idle:
        return step(carry)
    # A row in which no lane is active is passed over.
    if jaxi.undifferentiable_effects(body) or any(map(jaxi.is_on_host, (*body.in_avals, *body.out_avals))):
        # JAX maps no `lax.cond` with such effects, or in host memory, so the step is a loop of one step or none.
        taken = jnp.any(active).astype(jnp.int32)
        kind = Decided(EveryResidual(reason="a step that a batch may pass over"))
        out = run_function(lambda _, *carry: step(carry), carry, bound=1, high=taken, kind=kind)
        return [*out.carry, *(y[0] for y in out.ys)]
    idle = [*carry, *(jaxi.zeros(stacked(aval, axis.size)) for aval in body.out_avals[len(carry) :])]
    out = lax.cond(jnp.any(active), lambda: step(carry), lambda: idle)
    # What the body returns as it came (`buffer_versions.returned`) goes round the `cond`, which hides that it does. So
    # do the rows that an inverse reads.
    kept = returned(body, range(1 + len(consts), 1 + len(consts) + len(carry)))
    return [*(old if keeps else new for keeps, old, new in zip(kept, carry, out, strict=False)), *out[len(carry) :]]


def step_of_all(body: ClosedJaxpr, axis: Axis, mapped: LoopInputs, outputs: Sequence[bool]) -> ClosedJaxpr:
    """One step of such a body for lanes that all take it; `outputs` says which results have lanes.

    JAX makes a choice from whole arrays of a branch that each lane takes on its own. Of an array of which the branch
    writes rows, these are written where the branch is taken: as if other lanes had finished.
    """
    plain = uniform_body(body, axis, flatten(mapped), outputs)
    if axis.mesh_axis is not None:  # JAX asks for types of its own there
        return plain
    body = summing_in_place(body, 1 + len(mapped.consts))
    own, left = kept_by_lanes(body, axis.size, mapped)
    chosen = {eqn.outvars[0].aval for eqn in equations_in(plain) if jaxi.is_select(eqn)}
    if acts(body) or chosen.isdisjoint(plain.out_avals[k] for k in left):
        return plain
    in_axes, out_axes = (0, None, *axes_of(flatten(mapped))), axes_of(outputs)
    function = jax.vmap(guarded(body, own, left), in_axes=in_axes, out_axes=out_axes, **axis.arguments)
    return trace(lambda *inputs: function(jnp.ones(axis.size, bool), *inputs), plain.in_avals)


def within_limits(row: Any, limits: Sequence[Any], has_limits: Mask, axis: Axis) -> Any:
    """Which lanes have this row within their limits."""
    which = active_p.bind if axis.similar else active_lanes  # the primitive stays visible in the body
    return which(row, *limits, has_limits=has_limits, lanes=axis.size)[0]


def hull(low: Any, high: Any) -> tuple[Any, Any]:
    """The limits that hold those of all lanes; empty where there are no lanes."""
    empty = jnp.zeros((), jnp.int32)
    lowest = over_lanes(jnp.min, low) if jnp.size(low) else empty
    return lowest, over_lanes(jnp.max, high) if jnp.size(high) else empty


def steps_of_each(low: Any, high: Any, axis: Axis) -> Any:
    """The number of steps of each lane whose limits are all that stops it: int32[lanes]."""
    return jnp.broadcast_to(jnp.maximum(high - low, 0), (axis.size,))


def when_filled(body: ClosedJaxpr, mapped: LoopInputs) -> When:
    """When finished lanes need the operands of others: arithmetic is harmless until a derivative sums lanes.

    A finished lane takes no step of a loop in the body: but one of which others see something does.
    """
    is_harmless = is_arithmetic(body)
    if is_harmless and holds_stoppable(body):
        is_harmless = not mixing_primitive(body) and stop_suffices(body, (False, *flatten(mapped)))
    return "in_derivatives" if is_harmless else "always"


def lanes_body(
    closed: ClosedJaxpr, axis: Axis, has_limits: Mask, limit_avals: tuple[Any, ...], mapped: LoopInputs
) -> ClosedJaxpr:
    """A body (row, *consts, *carry, *xs) -> (*carry, *y) for lanes with limits of their own.

    `mapped` says which of these inputs have an axis of lanes.
    """

    def body(row: Any, *operands: Any) -> list[Any]:
        # Before: [row, *consts, *carry, *xs] -> After: [row, [lows], [highs], *consts, *carry, *xs]
        limits, *groups = split_list(operands, [len(limit_avals), len(mapped.consts), len(mapped.carry)])
        active, when = within_limits(row, limits, has_limits, axis), when_filled(closed, mapped)
        return step_lanes(closed, axis, mapped, when, all(has_limits), active, row, LoopInputs(*groups))

    lanes = lane_avals(closed.in_avals[1:], flatten(mapped), axis)
    return trace(body, [closed.in_avals[0], *limit_avals, *lanes])


# A batch of reverse sweeps in lockstep: lanes whose limits differ share the row number, as in the loop.
#
# Also the check of an inverse at the end of the way back, which is that of each lane in any batch of sweeps.


@weakly_cached
def lockstep_sweep(
    sweep: ReverseSweep,
    axis: Axis,
    batched_consts: Mask,
    batched_xs: Mask,
    has_limits: Mask,
    limit_avals: tuple[Any, ...],
) -> ReverseSweep:
    """The step for lanes with limits of their own: consts are [lows], [highs], *consts."""
    carry, state = (True,) * sweep.num_carry, (True,) * sweep.num_state
    # Of the step, the carry and the state go from row to row; of the inverse, the state alone.
    step = LoopInputs(batched_consts, (*carry, *state), batched_xs)
    back = LoopInputs(batched_consts, state, batched_xs[: sweep.num_forward_xs])
    lanes = sweep._replace(
        step=lanes_body(sweep.step, axis, has_limits, limit_avals, step),
        inverse=sweep.inverse and lanes_body(sweep.inverse, axis, has_limits, limit_avals, back),
        num_consts=sweep.num_consts + len(limit_avals),
        lanes=Lockstep(),
    )
    return with_drift_of_lanes(lanes, axis, state, (True,) * (sweep.num_carry + len(sweep.y_avals)))


def with_drift_of_lanes(sweep: ReverseSweep, axis: Axis, batched_state: Mask, batched_results: Mask) -> ReverseSweep:
    """The sweep of a batch with the drift of each lane in its check."""
    drift = sweep.saving.drift
    if drift is None or not any(batched_state):
        return sweep
    of_lanes = _DriftOfLanes(drift, axis, batched_state, batched_results, sweep.num_carry)
    saving = replace(sweep.saving, drift=of_lanes)  # pyright: ignore[reportArgumentType] - all savings are dataclasses
    return sweep._replace(saving=saving)


@dataclass(frozen=True)
class _DriftOfLanes:
    """`Saving.drift` of a batch: a lane that has drifted says nothing of the others.

    Results without lanes have come from states without lanes, and are checked by these.
    """

    of_lane: Callable[[Any, Any, Any, Any], Any]
    axis: Axis
    batched_state: Mask  # which leaves of the state have lanes
    batched_results: Mask  # which results have: carries in front, ys behind their rows
    num_carry: int

    def __call__(self, start: Any, end: Any, last: Any, results: Sequence[Any]) -> list[Any]:
        states, out = axes_of(self.batched_state), [int(i >= self.num_carry) for i in range(len(results))]
        given = [at if has_lanes else None for at, has_lanes in zip(out, self.batched_results, strict=True)]
        mapped = jax.vmap(self.of_lane, in_axes=(states, states, states, given), out_axes=out, **self.axis.arguments)
        of_lanes = mapped(list(start), list(end), list(last), list(results))
        if all(self.batched_results):
            return of_lanes

        def first_lanes(values: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
            pairs = zip(values, axes, strict=True)
            return [x if at is None else lax.index_in_dim(x, 0, at, keepdims=False) for x, at in pairs]

        # Leaves with lanes say nothing of all: they are as if they had come back to their start.
        own, flags = first_lanes(start, states), self.batched_state
        shared = [[o if f else x for o, f, x in zip(own, flags, leaves, strict=True)] for leaves in (start, end, last)]
        of_all = self.of_lane(*shared, first_lanes(results, given))  # pyright: ignore[reportCallIssue]
        leaves = zip(of_lanes, self.batched_results, of_all, strict=True)
        return [own if has_lanes else x for own, has_lanes, x in leaves]


class LaneOperands(NamedTuple):
    """The operands of a batch; those that lanes have of their own have an axis of lanes, rows of xs a second one."""

    has_limits: Mask  # whether lanes have a low and a high of their own
    own: list[Any]  # these
    mapped: LoopInputs  # which other operands lanes have of their own; each leaf of the carry
    inputs: LoopInputs


def result_axes(loop: Loop, num_steps: Any, checkpoint_rows: Any, batched: LoopOutputs | None = None) -> Outcome:
    """At which axis each result has its lanes, None where it has none: lanes stand behind the rows of ys and saved.

    `num_steps` and `checkpoint_rows` are their own answers. `batched` says which outputs have lanes; None: all.
    """
    results = loop.results_from(num_steps, batched or map_leaves(lambda _: True, loop.output_avals), checkpoint_rows)
    return results._replace(carry=axes_of(results.carry), ys=axes_of(results.ys, 1), saved=axes_of(results.saved, 1))


def own_start(own: Sequence[Any], has_limits: Mask, reverse: bool) -> Sequence[Any]:
    """Of the limits that lanes have of their own, the one where they start, if it is among them."""
    if reverse:
        return own[-1:] if has_limits[1] else ()
    return own[:1] if has_limits[0] else ()


def goes_on(row: Any, own: Sequence[Any], has_limits: Mask, reverse: bool) -> Any:
    """Which lanes have rows from `row` on, also ones that have not started; True where all share a bound."""
    if all(has_limits):
        low, high = own
        return (low < high) & ((low <= row) if reverse else (row < high))
    if reverse and has_limits[0]:
        return own[0] <= row
    if not reverse and has_limits[1]:
        return row < own[-1]
    return True


def takes_any_step(loop: Loop) -> bool:
    """Whether a batch computes the one step of a loop for all lanes, and drops it where it is not taken."""
    return loop.may_discard or (loop.bound == 1 and not loop.predicated and is_elementwise(loop.body))


def _summary(loop: Loop, axis: Axis, leave: Sequence[Any], carry: Sequence[Any], row: Any, ahead: Any) -> list[Any]:
    """Whether more lanes go on than it leaves, where the batch has a predicate, and how many do, where it shows that.

    `carry` is that of all lanes (what stands behind it is not read), and its first leaf their predicates; `row` is the
    next one, and `ahead` says which lanes have rows from there on.
    """
    # Lanes that are counted do so until the row of the step that breaks: a batch that walks again takes the same rows.
    go_on = carry[0] & ahead & loop.is_before_stop(row, carry, or_at=bool(leave)) if loop.predicated else ahead
    summary = []
    if loop.predicated:
        summary.append(jnp.sum(go_on, dtype=jnp.int32) > leave[0] if leave else jnp.any(go_on))
    if loop.reporting is not None:
        # Where each lane is a batch that counts its own lanes, these are counted.
        counts = jnp.ones(axis.size, jnp.int32) if loop.active_count_index is None else carry[loop.active_count_index]
        summary.append(jnp.sum(jnp.where(go_on, counts, 0), dtype=jnp.int32))
    return summary


@weakly_cached
def _lanes_loop(
    loop: Loop, axis: Axis, mapped: LoopInputs, has_limits: Mask, avals: tuple[tuple[Any, ...], ...]
) -> Loop:
    """The loop of a batch in lockstep, whose rows are those of all lanes.

    In front of the consts stand how many lanes it leaves, if it leaves any (`avals[0]`), and the limits of the lanes
    (`avals[1]`): the lows, the highs, or both. In front of the carry stand (`avals[2]`), each where there is need of
    it:

    - whether the batch goes on, if the loop has a predicate: that of the batch, as the lanes' own is the first leaf of
      their carry;
    - how many lanes go on, if the loop shows its progress;
    - the end of each lane, if the loop has a predicate (`walk_row` in `core/masking.py`).
    """
    refuse_collectives(loop.body, axis.name)
    leave_avals, limit_avals, extra = avals
    num_limits, num_extra, num_added = len(limit_avals), len(extra), len(leave_avals) + len(limit_avals)
    may_discard = takes_any_step(loop)
    # A cheap step that all lanes take, also those that are done: nothing is filled, and results are dropped. What lanes
    # share is repeated, so that a derivative that is NaN in a lane that is done is masked before lanes are summed.
    when = "never" if may_discard else when_filled(loop.body, mapped)
    has_lanes = map_leaves(lambda _: True, mapped) if may_discard else mapped
    # There is a row in which no lane is active
    # - between the limits of two lanes, if lanes have starts and ends of their own;
    # - where all lanes that have started are done by their predicate, if lanes have starts of their own.
    may_idle = all(has_limits) or (loop.predicated and bool(own_start(limit_avals, has_limits, loop.reverse)))

    def body(row: Any, *operands: Any) -> list[Any]:
        # Before: [row, *consts, *carry, *x] -> [*carry, *y]
        # After: [row, *leave, *own, *consts, *extra, *carry, *x] -> [*extra, *carry, *y]
        # Own are lows and highs; extra: whether the batch goes on, how many lanes do, and the end of each.
        sizes = [len(leave_avals), num_limits, loop.num_consts, num_extra, loop.num_carry]
        leave, own, consts, extra, carry, xs = split_list(operands, sizes)
        active = within_limits(row, own, has_limits, axis)
        ends = []
        if loop.predicated:
            active = active & carry[0] & loop.is_before_stop(row, carry)
            start = own_start(own, has_limits, loop.reverse)
            *ends, active = walk_row_p.bind(extra[-1], active, row, *start, reverse=loop.reverse)
        inputs = LoopInputs(consts, carry, xs)
        if may_discard:
            inputs = map_leaves(lambda x, own: x if own else fill_axis(axis, x, None), inputs, mapped)
        if loop.idles:  # lanes that are done need neither a mask nor operands of others
            of_lanes = jax.vmap(jaxpr_as_fun(loop.body), (None, *axes_of(flatten(mapped))), 0, **axis.arguments)
            out = of_lanes(row, *flatten(inputs))
        else:
            out = step_lanes(loop.body, axis, has_lanes, when, may_idle, active, row, inputs)
        if not num_extra:
            return out
        # A lane that starts later is not active, and goes on: what is ahead of it decides, not its activity.
        following = row - 1 if loop.reverse else row + 1
        ahead = goes_on(following, own, has_limits, loop.reverse)
        return [*_summary(loop, axis, leave, out, following, ahead), *ends, *out]

    row, inputs = loop.body.in_avals[0], flatten(loop.input_avals)
    consts, carry, xs = unflatten(mapped, lane_avals(inputs, flatten(mapped), axis))
    inputs = [row, *leave_avals, *limit_avals, *consts, *extra, *carry, *xs]
    return loop._replace(
        reporting=loop.reporting and loop.reporting._replace(counts_lanes=True),
        inverse=loop.inverse and _lanes_inverse(loop, axis, mapped, has_limits, avals[1:], inputs),
        body=trace(body, inputs),
        num_consts=loop.num_consts + num_added,
        num_carry=loop.num_carry + num_extra,
        stop=loop.stop and loop.stop + num_extra,
        saved=loop.saved and ((False,) * num_extra + loop.saved),
        lanes=Lockstep(),
        may_discard=may_discard,
        debug_info=loop.debug_info and loop.debug_info.in_lockstep(axis.size, num_added, num_extra),
    )


def _lanes_inverse(
    loop: Loop,
    axis: Axis,
    mapped: LoopInputs,
    has_limits: Mask,
    avals: tuple[tuple[Any, ...], ...],
    input_avals: Sequence[Any],
) -> ClosedJaxpr:
    """The inverse for such lanes, with the inputs of the body: a lane that has not taken a step keeps its carry."""
    assert loop.inverse is not None
    limit_avals, extra = avals
    walked, walked_avals = has_limits, limit_avals
    if loop.predicated:
        # Its end says which rows a lane with a predicate has walked.
        start = own_start(limit_avals, has_limits, loop.reverse)
        walked, walked_avals = walked_limits(extra[-1], start, loop.reverse)
    back = jaxpr_as_fun(lanes_body(loop.inverse, axis, walked, walked_avals, mapped))

    def body(row: Any, *operands: Any) -> list[Any]:
        sizes = [len(limit_avals), loop.num_consts, len(extra), loop.num_carry]
        own, consts, extra_after, carry, xs = split_list(operands, sizes)
        if not loop.predicated:
            return [*extra_after, *back(row, *own, *consts, *carry, *xs)]
        _, limits = walked_limits(extra_after[-1], own_start(own, has_limits, loop.reverse), loop.reverse)
        # The ends of lanes stay what they are: they say which rows have been walked, on all of the way back.
        return [jnp.ones_like(extra_after[0]), *extra_after[1:], *back(row, *limits, *consts, *carry, *xs)]

    return trace(body, input_avals)


def run_lanes(loop: Loop, axis: Axis, low: Any, high: Any, lanes: LaneOperands, *leave: Any) -> tuple[Outcome, Any]:
    """Walk the rows `low ... high - 1`; also returns the steps of each lane (None without a predicate).

    Lanes with a predicate stop when no more than `leave` of them go on, if that is given: int32.
    """
    consts, carry, xs = lanes.inputs
    extra, begun, first_rows = [], [], []
    stops = [carry[i] for i in loop.stops[:1]]  # where each lane ends, if it ends before a step
    if loop.predicated or loop.reporting is not None:
        first = high - 1 if loop.reverse else low
        ahead = goes_on(first, lanes.own, lanes.has_limits, loop.reverse)
        extra = _summary(loop, axis, leave, carry, first, ahead)
        begun = [pick(carry[0] & ahead, stop, jnp.int32(NOT_STARTED)) for stop in stops]
    if loop.predicated:
        # A lane starts at the first of these rows, or at one of its own behind that.
        start, later = (high, jnp.minimum) if loop.reverse else (low, jnp.maximum)
        for own in own_start(lanes.own, lanes.has_limits, loop.reverse):
            start = later(start, own)
        start = jaxi.vary_like(start, jax.typeof(extra[0]))
        first_rows = [start if start.ndim else fill_axis(axis, start, None)]
        extra += first_rows
    avals = tuple(tuple(jax.typeof(x) for x in group) for group in (leave, lanes.own, extra))
    batch = _lanes_loop(loop, axis, LoopInputs(*map(tuple, lanes.mapped)), lanes.has_limits, avals)
    carry = [begun[0] if i in loop.stops[:1] else x for i, x in enumerate(carry)]
    if loop.idles:  # lanes may wait for each other: their predicates end the loop, and no number of steps does
        high = jnp.full_like(high, MOST_STEPS)
    out = run(batch, low, high, [*leave, *lanes.own, *consts], [*extra, *carry], xs)
    extra, carry = split_list(out.carry, [len(extra)])
    for i, old, new in zip(loop.stops, stops, begun, strict=False):
        carry[i] = jnp.where(new == NOT_STARTED, old, carry[i])
    num_steps = [a - b if loop.reverse else b - a for a, b in zip(first_rows, extra[-1:], strict=False)]
    return out._replace(carry=carry), num_steps[0] if num_steps else None
