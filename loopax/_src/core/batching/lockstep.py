"""A batch of loops that stop at different steps, in lockstep.

Lanes share the row number, so rows of xs are never gathered. A lane is active while the row is in
its own window `low <= row < high` and its own predicate is True; the batch goes on until no lane is, or
until no more than some are.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.batching.groups import run_function
from loopax._src.core.buffer_versions import buffers, read_only
from loopax._src.core.effects import acts, guarded
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lanes import Lockstep
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, Outcome, run
from loopax._src.core.ir.plan import EveryResidual
from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.dependence import is_arithmetic, is_elementwise, mixed_inputs
from loopax._src.core.jaxpr.types import Axis, axes_of, fill_axis, lane_avals
from loopax._src.core.jaxpr.util import (
    Mask,
    collective_over,
    either,
    flatten,
    invert,
    map_leaves,
    merge_lists,
    reject,
    select,
    split_list,
    stacked,
    trace,
    weakly_cached,
)
from loopax._src.core.masking import When, active_lanes, fill_inactive, over_lanes, pick, visibly_active
from loopax._src.jax_internals import (
    ClosedJaxpr,
    is_sum,
    jaxpr_as_fun,
    undifferentiable_effects,
    vary_like,
    zero,
    zeros,
)
from loopax._src.messages import collective_message

# One step of a batch of loops that stop at different times.
#
# A finished lane keeps its carry. What it computes meanwhile is thrown away, so it computes something harmless: its
# operands are filled with those of a lane that is still active (`core/masking.py`), so a loop inside the body
# never spins for a lane that is done, and no derivative meets what lies outside of the body's domain.


def lane_function(body: ClosedJaxpr, batched: Sequence[bool], axis: dict[str, Any]) -> Callable[..., list[Any]]:
    """`f(active, row, *operands)`: the body for all lanes; effects of finished lanes are suppressed."""
    if acts(body):
        function = guarded(body)
        in_axes = (0, None, *(0 if b else None for b in batched))
        return jax.vmap(function, in_axes=in_axes, out_axes=0, **axis)
    plain = jax.vmap(jaxpr_as_fun(body), in_axes=(None, *(0 if b else None for b in batched)), out_axes=0, **axis)
    return lambda _, *operands: plain(*operands)


def accumulators(body: ClosedJaxpr, carry: range) -> Mask:
    """Which leaves of the carry are only added to: a lane may keep its own, for sums have no domain to leave.

    Such are the cotangents of a lane's own weights, which are as large as the weights.
    """
    uses = Counter(id(atom) for eqn in body.eqns for atom in eqn.invars)
    uses.update(id(atom) for atom in body.outvars)
    sums = {id(eqn.outvars[0]): eqn for eqn in body.eqns if is_sum(eqn)}

    def only_added_to(leaf: Any, out: Any) -> bool:
        total = sums.get(id(out))
        return total is not None and uses[id(leaf)] == 1 and any(atom is leaf for atom in total.invars)

    leaves = [body.invars[i] for i in carry]
    return tuple(only_added_to(leaf, out) for leaf, out in zip(leaves, body.outvars, strict=False))


def step_lanes(
    function: Callable[..., list[Any]],
    active: Any,
    row: Any,
    consts: Sequence[Any],
    others: Sequence[Any],
    filled: Sequence[bool],
    carry: Sequence[Any],
    in_place: Mask,
    when: When,
) -> list[Any]:
    """New carry and rows of ys for all lanes; those of finished lanes are the old carry, and zeros.

    Constants are filled already; `filled` says which of the other operands are to be. In leaves of the carry that are
    changed `in_place`, finished lanes do not write.
    """
    out = function(active, row, *consts, *fill_inactive(active, others, filled, when))
    new_carry, ys = split_list(out, [len(carry)])
    leaves = zip(in_place, new_carry, carry, strict=True)
    return [
        *(new if changed else pick(active, new, old) for changed, new, old in leaves),
        *(pick(active, y, zero(y.dtype)) for y in ys),
    ]


def skip_idle_rows(
    body: ClosedJaxpr, step: Callable[..., list[Any]], active: Any, carry: Sequence[Any], y_avals: Sequence[Any]
) -> list[Any]:
    """One step where the windows of lanes may leave rows in which no lane is active: those are passed over.

    `step` is a function of the carry, and evaluates the body of one lane for all.
    """
    if undifferentiable_effects(body):
        # The step is a loop: JAX maps no `lax.cond` with such effects.
        taken, kind = (
            jnp.any(active).astype(jnp.int32),
            Decided(EveryResidual(reason="a step that a batch may pass over")),
        )
        out = run_function(lambda _, *carry: step(carry), carry, bound=1, high=taken, kind=kind)
        return [*out.carry, *(y[0] for y in out.ys)]
    idle = [*carry, *map(zeros, y_avals)]
    return lax.cond(jnp.any(active), lambda: step(carry), lambda: idle)


def in_window(row: Any, window: Sequence[Any], windows: Mask, axis: Axis) -> Any:
    """Which lanes have this row in their window."""
    which = visibly_active if axis.similar else active_lanes
    return which(row, window, windows, axis.size)


def hull(low: Any, high: Any) -> tuple[Any, Any]:
    """The window that holds those of all lanes; empty where there are no lanes."""
    empty = jnp.zeros((), jnp.int32)
    lowest = over_lanes(jnp.min, low) if jnp.size(low) else empty
    return lowest, over_lanes(jnp.max, high) if jnp.size(high) else empty


def when_filled(body: ClosedJaxpr) -> When:
    """When finished lanes need the operands of others: mere arithmetic on their own is harmless until it is summed."""
    return "in_derivatives" if is_arithmetic(body) else "always"


def filled_operands(
    body: ClosedJaxpr, consts: Sequence[bool], num_carry: int, rest: Sequence[bool]
) -> tuple[Mask, Mask]:
    """Which constants, and which other operands, of a body finished lanes do not read of their own.

    What other lanes see of a lane is its own: the key from which JAX draws for all lanes (`core/jaxpr/dependence.py`).
    """
    carry = range(1 + len(consts), 1 + len(consts) + num_carry)
    own = either(accumulators(body, carry), buffers(body, carry))
    own_consts = read_only(body, range(1, carry.start))
    own = either((*own_consts, *own, *invert(rest)), mixed_inputs(body)[1:])
    filled = zip((*consts, *(True,) * num_carry, *rest), own, strict=True)
    filled_consts, others = split_list((is_batched and not is_own for is_batched, is_own in filled), [len(consts)])
    return tuple(filled_consts), tuple(others)


def lanes_body(
    closed: ClosedJaxpr, axis: Axis, windows: Mask, window_avals: tuple[Any, ...], mapped: Sequence[Mask]
) -> ClosedJaxpr:
    """A body (row, *consts, *carry, *others) -> (*carry, *y) for lanes with windows of their own.

    mapped: which consts, carry leaves and others have an axis of lanes.
    """
    function = lane_function(closed, flatten(mapped), axis.arguments)
    consts_mapped, carry_mapped, others_mapped = mapped
    num_consts, num_carry = len(consts_mapped), len(carry_mapped)
    filled_consts, filled = filled_operands(closed, consts_mapped, num_carry, others_mapped)
    in_place = buffers(closed, range(1 + num_consts, 1 + num_consts + num_carry))
    y_avals = [stacked(a, axis.size) for a in closed.out_avals[num_carry:]]
    when = when_filled(closed)

    def body(row: Any, *operands: Any) -> list[Any]:
        window, consts, carry, others = split_list(operands, [sum(windows), num_consts, num_carry])
        active = in_window(row, window, windows, axis)
        consts = fill_inactive(active, consts, filled_consts, when)

        def step(carry: Sequence[Any]) -> list[Any]:
            return step_lanes(function, active, row, consts, [*carry, *others], filled, carry, in_place, when)

        return skip_idle_rows(closed, step, active, carry, y_avals) if all(windows) else step(carry)

    lanes = lane_avals(closed.in_avals[1:], flatten(mapped), axis)
    return trace(body, [closed.in_avals[0], *window_avals, *lanes])


# A batch of reverse sweeps in lockstep: lanes whose windows of rows differ share the row number, as in the loop.
#
# Also the check of an inverse at the end of the way back, which is that of each lane in any batch of sweeps.


@weakly_cached
def lockstep_sweep(
    sweep: ReverseSweep, axis: Axis, consts: Mask, xs: Mask, windows: Mask, window_avals: tuple[Any, ...]
) -> ReverseSweep:
    """The step for lanes with windows of their own: consts are [lows], [highs], *consts."""
    carry, state = (True,) * sweep.num_carry, (True,) * sweep.num_state
    front = xs[: sweep.num_forward_xs]
    lanes = sweep._replace(
        step=lanes_body(sweep.step, axis, windows, window_avals, [consts, (*carry, *state), xs]),
        inverse=sweep.inverse and lanes_body(sweep.inverse, axis, windows, window_avals, [consts, state, front]),
        num_consts=sweep.num_consts + len(window_avals),
        lanes=Lockstep(),
    )
    return with_drift_of_lanes(lanes, axis, state, (True,) * (sweep.num_carry + len(sweep.y_avals)))


def with_drift_of_lanes(sweep: ReverseSweep, axis: Axis, state: Mask, results: Mask) -> ReverseSweep:
    """The sweep of a batch with the drift of each lane in its check; these leaves and results have lanes."""
    drift = sweep.saving.drift
    if drift is None or not any(state):
        return sweep
    of_lanes = _DriftOfLanes(drift, axis, state, results, sweep.num_carry)
    saving = replace(sweep.saving, drift=of_lanes)  # pyright: ignore[reportArgumentType] - all savings are dataclasses
    return sweep._replace(saving=saving)


@dataclass(frozen=True)
class _DriftOfLanes:
    """`Saving.drift` of a batch: a lane that has drifted says nothing of the others.

    Results without lanes have come from states without lanes, and are checked by these.
    """

    of_lane: Callable[[Any, Any, Any, Any], Any]
    axis: Axis
    state: Mask  # which leaves of the state have lanes
    results: Mask  # which results have: carries in front, ys behind their rows
    num_carry: int

    def __call__(self, start: Any, end: Any, last: Any, results: Sequence[Any]) -> list[Any]:
        states, out = axes_of(self.state), [int(i >= self.num_carry) for i in range(len(results))]
        given = [at if has_lanes else None for at, has_lanes in zip(out, self.results, strict=True)]
        mapped = jax.vmap(self.of_lane, in_axes=(states, states, states, given), out_axes=out, **self.axis.arguments)
        of_lanes = mapped(list(start), list(end), list(last), list(results))
        if all(self.results):
            return of_lanes
        without = [_first(x, at) for x, at in zip(results, given, strict=True)]
        of_all = self.of_lane(*self._shared(start, end, last), without)  # pyright: ignore[reportCallIssue]
        return merge_lists(self.results, reject(self.results, of_all), select(self.results, of_lanes))

    def _shared(self, *states: Any) -> list[list[Any]]:
        """Start, end and last carry without lanes; leaves with lanes as if they had come back to their start."""
        own = [_first(x, 0) for x in select(self.state, states[0])]
        return [merge_lists(self.state, reject(self.state, leaves), own) for leaves in states]


def _first(x: Any, axis: int | None) -> Any:
    """That of the first lane, if there are lanes."""
    return x if axis is None else jax.lax.index_in_dim(x, 0, axis, keepdims=False)


class LaneOperands(NamedTuple):
    """The operands of a batch; those that lanes have of their own have an axis of lanes, rows of xs a second one."""

    windows: Mask  # whether lanes have a low and a high of their own
    own: list[Any]  # these
    mapped: LoopInputs  # which other operands lanes have of their own; each leaf of the carry
    inputs: LoopInputs


def result_axes(loop: Loop, num_steps: Any, checkpoint_rows: Any, batched: LoopOutputs | None = None) -> Outcome:
    """At which axis each result has its lanes, None where it has none: lanes stand behind the rows of ys and saved.

    `num_steps` and `checkpoint_rows` are their own answers. `batched` says which outputs have lanes; None: all.
    """
    results = loop.results_from(num_steps, batched or map_leaves(lambda _: True, loop.output_avals), checkpoint_rows)
    return results._replace(carry=axes_of(results.carry), ys=axes_of(results.ys, 1), saved=axes_of(results.saved, 1))


def more_than(leave: int, active: Any) -> Any:
    """Whether more lanes than these are active."""
    return jnp.sum(active, dtype=jnp.int32) > leave if leave else jnp.any(active)


def goes_on(row: Any, own: Sequence[Any], windows: Mask, reverse: bool) -> Any:
    """Which lanes have rows from `row` on, also ones that have not started; True where all share a bound."""
    if all(windows):
        low, high = own
        return (low < high) & ((low <= row) if reverse else (row < high))
    if reverse and windows[0]:
        return own[0] <= row
    if not reverse and windows[1]:
        return row < own[-1]
    return True


def takes_any_step(loop: Loop) -> bool:
    """Whether a batch computes the one step of a loop for all lanes, and drops it where it is not taken."""
    return loop.may_discard or (loop.bound == 1 and not loop.predicated and is_elementwise(loop.body))


def _summary(loop: Loop, axis: Axis, leave: int, carry: Sequence[Any], ahead: Any) -> list[Any]:
    """Whether the batch goes on, where it has a predicate, and how many lanes do, where it shows that."""
    go_on = carry[0] & ahead if loop.predicated else ahead
    goes_on = [more_than(leave, go_on)] if loop.predicated else []
    if loop.reporting is None:
        return goes_on
    # Where each lane is a batch that counts its own lanes, these are counted.
    counts = jnp.ones(axis.size, jnp.int32) if loop.active_count_index is None else carry[loop.active_count_index]
    return [*goes_on, jnp.sum(jnp.where(go_on, counts, 0), dtype=jnp.int32)]


@weakly_cached
def _lanes_loop(
    loop: Loop, axis: Axis, mapped: LoopInputs, windows: Mask, avals: tuple[tuple[Any, ...], ...], leave: int
) -> Loop:
    """Consts: [lows], [highs], *consts; carry: [whether the batch goes on], [lanes that do], [steps of each], *carry.

    The number of lanes that go on is there where the loop shows it.
    """
    if collective_over(loop.body, axis.name):
        raise NotImplementedError(collective_message(axis.name))
    window_avals, extra = avals
    const_avals, carry_avals, xs_avals = (
        lane_avals(group, mask, axis) for group, mask in zip(loop.input_avals, mapped, strict=True)
    )
    may_discard = takes_any_step(loop)
    when = "never" if may_discard else when_filled(loop.body)
    has_lanes = map_leaves(lambda _: True, mapped) if may_discard else mapped
    function = lane_function(loop.body, flatten(has_lanes), axis.arguments)
    in_place = buffers(loop.body, loop.carry_range)
    filled_consts, filled_others = filled_operands(loop.body, has_lanes.consts, loop.num_carry, has_lanes.xs)
    num_windows, num_extra = len(window_avals), len(extra)
    start_batched = windows[1] if loop.reverse else windows[0]
    may_idle = all(windows) or (loop.predicated and start_batched)
    y_avals = [stacked(a, axis.size) for a in loop.output_avals.ys]

    def active_at(row: Any, own: Sequence[Any], carry: Sequence[Any]) -> Any:
        active = in_window(row, own, windows, axis)
        return active & carry[0] if loop.predicated else active

    def body(row: Any, *operands: Any) -> list[Any]:
        own, consts, extra, carry, xs = split_list(operands, [num_windows, loop.num_consts, num_extra, loop.num_carry])
        active = active_at(row, own, carry)
        if may_discard:
            consts, xs = _repeated(axis, consts, mapped.consts), _repeated(axis, xs, mapped.xs)
        filled = fill_inactive(active, consts, filled_consts, when)

        def step(carry: Sequence[Any]) -> list[Any]:
            return step_lanes(function, active, row, filled, [*carry, *xs], filled_others, carry, in_place, when)

        out = skip_idle_rows(loop.body, step, active, carry, y_avals) if may_idle else step(carry)
        if not num_extra:
            return out
        ahead = goes_on(row - 1 if loop.reverse else row + 1, own, windows, loop.reverse)
        taken = [extra[-1] + active.astype(jnp.int32)] if loop.predicated else []
        return [*_summary(loop, axis, leave, out, ahead), *taken, *out]

    reporting = loop.reporting and loop.reporting._replace(counts_lanes=True)
    return loop._replace(
        reporting=reporting,
        inverse=loop.inverse and _lanes_inverse(loop, axis, mapped, windows, window_avals, extra),
        body=trace(body, [loop.body.in_avals[0], *window_avals, *const_avals, *extra, *carry_avals, *xs_avals]),
        num_consts=loop.num_consts + num_windows,
        num_carry=loop.num_carry + num_extra,
        saved=loop.saved and ((False,) * num_extra + loop.saved),
        lanes=Lockstep(),
        may_discard=may_discard,
        debug_info=loop.debug_info and loop.debug_info.in_lockstep(axis.size, num_windows, num_extra),
    )


def _repeated(axis: Axis, operands: Sequence[Any], mapped: Sequence[bool]) -> list[Any]:
    """What all lanes share, for each of them: its derivative is masked in each lane, and then summed."""
    return [x if has_lanes else fill_axis(axis, x, None) for x, has_lanes in zip(operands, mapped, strict=True)]


def _lanes_inverse(
    loop: Loop, axis: Axis, mapped: LoopInputs, windows: Mask, window_avals: Sequence[Any], extra: Sequence[Any]
) -> ClosedJaxpr:
    """The inverse for such lanes: one that has not taken the step keeps its carry.

    Where a lane has a predicate, its number of steps says which rows it has walked: the number stays what it is.
    """
    assert loop.inverse is not None
    walked, walked_avals = windows, list(window_avals)
    if loop.predicated:
        walked, walked_avals = (True, True), [extra[-1], extra[-1]]
    groups = [tuple(mapped.consts), tuple(mapped.carry), tuple(mapped.xs)]
    inverse = lanes_body(loop.inverse, axis, walked, tuple(walked_avals), groups)
    back = jaxpr_as_fun(inverse)
    _, *avals = inverse.in_avals
    _, const_avals, carry_avals, xs_avals = split_list(avals, [len(walked_avals), loop.num_consts, loop.num_carry])

    def body(row: Any, *operands: Any) -> list[Any]:
        own, consts, extra_after, carry, xs = split_list(
            operands, [len(window_avals), loop.num_consts, len(extra), loop.num_carry]
        )
        if not loop.predicated:
            return [*extra_after, *back(row, *own, *consts, *carry, *xs)]
        taken = extra_after[-1]
        low, high = (own[-1] - taken, own[-1]) if loop.reverse else (own[0], own[0] + taken)
        goes_on = jnp.ones_like(extra_after[0])
        return [goes_on, *extra_after[1:], *back(row, low, high, *consts, *carry, *xs)]

    return trace(body, [loop.body.in_avals[0], *window_avals, *const_avals, *extra, *carry_avals, *xs_avals])


def _with_own_start(lanes: LaneOperands, axis: Axis, first: Any, place: int) -> LaneOperands:
    """The lanes with a first row of their own: `low`, or `high` where rows are walked from the last."""
    if lanes.windows[place]:
        return lanes
    windows = tuple(own or i == place for i, own in enumerate(lanes.windows))
    start = jnp.broadcast_to(first, (axis.size,))
    return lanes._replace(windows=windows, own=[*lanes.own, start] if place else [start, *lanes.own])


def run_lanes(loop: Loop, axis: Axis, low: Any, high: Any, lanes: LaneOperands, leave: int = 0) -> tuple[Outcome, Any]:
    """Walk the rows `low ... high - 1`; also returns the steps of each lane (None without a predicate).

    Lanes with a predicate stop when no more than `leave` of them go on.
    """
    extra = []
    if loop.predicated and loop.inverse is not None:
        lanes = _with_own_start(lanes, axis, high if loop.reverse else low, int(loop.reverse))
    if loop.predicated or loop.reporting is not None:
        first = high - 1 if loop.reverse else low
        ahead = goes_on(first, lanes.own, lanes.windows, loop.reverse)
        extra = _summary(loop, axis, leave, lanes.inputs.carry, ahead)
    if loop.predicated:
        extra.append(fill_axis(axis, vary_like(jnp.int32(0), jax.typeof(extra[0])), None))
    avals = tuple(tuple(jax.typeof(x) for x in group) for group in (lanes.own, extra))
    batch = _lanes_loop(loop, axis, LoopInputs(*map(tuple, lanes.mapped)), lanes.windows, avals, leave)
    consts, carry, xs = lanes.inputs
    out = run(batch, low, high, [*lanes.own, *consts], [*extra, *carry], xs)
    extra, carry = split_list(out.carry, [len(extra)])
    return out._replace(carry=carry), extra[-1] if loop.predicated else None


def own_limits(windows: Mask, low: Any, high: Any) -> list[Any]:
    """Those of the two that lanes have of their own."""
    return select(windows, (low, high))
