"""Running a loop on a user's pytrees: the traced step becomes a loop of the core, and its results pytrees again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src import core
from loopax._src.core.jaxpr.util import MOST_STEPS, split_list
from loopax._src.frontend import options as arguments
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.options import SCAN, no_capacity
from loopax._src.frontend.references import NO_REFERENCES, ReferenceRows, refuse_references_in
from loopax._src.frontend.runtime_checks import Check, KindCheck, settle
from loopax._src.frontend.trace import Step, trace_promoting
from loopax._src.jax_internals import vary_like, zeros
from loopax._src.kinds import Kind
from loopax._src.lanes import Lanes
from loopax._src.messages import derivative_and_references_message, derivative_message
from loopax._src.nnx.functional import freeze, thaw, thaw_numbered
from loopax._src.nnx.writeback import hand_over, refuse_lost_changes, take_back
from loopax._src.progress import Reporter
from loopax._src.pytrees.leaves import Spec, match_carry, pack, restore_weak
from loopax._src.pytrees.types import LoopInfo

# The user's argument for the first carry, in errors; elsewhere it is `init_val`. That of a rollout has a field `state`.
_INITIAL = {"scan": "scan(init=...)", "rollout": "rollout"}


@dataclass(frozen=True)
class LoopSpec:
    """The rows that a loop walks, and how."""

    name: str  # of the loop, as the user calls it
    extent: Extent
    reverse: bool
    unroll: int
    kind: Kind
    lanes: Lanes
    throw: bool = True  # whether what goes wrong when it runs is an error
    reporter: Reporter | None = None  # to whom it tells how far it is
    branch: str = ""  # which function of a `cond` or a `switch` it is; empty for loops


@dataclass(frozen=True)
class Finished:
    """The results of a loop on pytrees, NNX objects in them frozen."""

    num_steps: Any
    goes_on: Any
    carry: Any
    ys: Any
    checks: list[Check]
    hand_over: Callable[[Any], Any]  # from the carry to what the user gets; NNX objects in xs are changed too


def run(
    step: Step,
    loop_spec: LoopSpec,
    extras: Sequence[Any],
    init: Any,
    xs: Any,
    goes_on: Callable[[Any], Any] | None,
    references: ReferenceRows = NO_REFERENCES,
) -> Finished:
    """Run a loop; `goes_on(init)` says whether to take the first step (None: the loop has no condition).

    `references` are those whose values are among xs.
    """
    extent = loop_spec.extent
    fixed = extent.fixed and goes_on is None
    frozen = freeze(init)
    refuse_references_in(_INITIAL.get(loop_spec.name, f"{loop_spec.name}(init_val=...)"), frozen)
    step = references.step(step)
    storage = core.Asked.of(loop_spec.kind, extent.bound, fixed, extent.bound_is_loose)
    x_arrays, x_spec = pack(freeze(xs))
    traced, arrays, spec = trace_promoting(step, extras, frozen, x_spec.rows(), goes_on is not None)
    refuse_lost_changes(step.where, init, traced.changes, xs, traced.row_changes)
    references.refuse_closed_over(step.where, traced.references)
    _refuse_other_derivative(step, loop_spec, bool(traced.references))
    if extent.capacity is None and any(traced.rows.written):
        raise no_capacity(SCAN, "NNX objects in xs", "set up what they hold before the scan")
    first_flag = int(goes_on is not None) + len(arrays)
    flags = [zeros(aval) for aval in traced.body.out_avals[first_flag:][: len(traced.messages)]]
    start = []
    if goes_on is not None:
        first, arrays = first_condition(step, goes_on, spec, arrays)
        start = [vary_like(first, traced.body.out_avals[0])]
    loop = core.Loop(
        traced.body,
        num_consts=len(traced.closed_over) + len(extras),
        num_carry=len(start) + len(arrays) + len(flags) + len(traced.references),
        bound=extent.bound,
        reverse=loop_spec.reverse,
        predicated=goes_on is not None,
        unroll=loop_spec.unroll,
        storage=storage,
        inverse=traced.inverse,
        stages=loop_spec.lanes.stages,
        reporting=loop_spec.reporter and core.Reporting(loop_spec.reporter),
        debug_info=core.DebugInfo(
            loop_spec.name,
            loop_spec.kind.without_functions(),
            loop_spec.lanes,
            fixed,
            extent.bound_is_loose,
            traced.names,
            extent.bound,
            branch=loop_spec.branch,
        ),
    )
    consts = [*traced.closed_over, *extras]
    carry = [*start, *arrays, *flags, *(reference[...] for reference in traced.references)]
    rows = [x[: extent.bound] for x in x_arrays]
    operands = core.LoopOperands(extent.low, extent.high, consts, carry, rows)

    def user_carry(leaves: Sequence[Any]) -> Any:
        return thaw(spec.unpack(leaves[len(start) :][: len(arrays)]))

    checked = KindCheck(f"loopax.{loop_spec.name}", loop_spec.throw)
    call = core.LoopCall(loop, operands, fixed, step.where, user_carry, checked, core.run_with_tape)

    def run_now() -> core.Outcome:
        return core.run_free(loop, *operands) if loop_spec.lanes.is_free else loop_spec.kind.run(call)

    out = loop_spec.reporter.watch(run_now) if loop_spec.reporter else run_now()
    last, carry, flags, values = split_list(out.carry, [len(start), len(arrays), len(flags)])
    for reference, value in zip(traced.references, values, strict=True):
        reference[...] = value
    checks = [Check(flag, message) for flag, message in zip(flags, traced.messages, strict=True)]
    ys = [_pad(y, extent.capacity or 0) for y in out.ys]
    rows, ys = split_list(ys, [sum(traced.rows.written)])
    walked = _walked(extent, loop_spec.reverse, out.num_steps)
    xs_after = traced.rows.xs_after(x_arrays, rows, walked)
    ys = traced.y_spec.unpack(restore_weak(ys, traced.y_spec.avals))

    def hand_over_all(carry: Any) -> Any:
        hand_over(step.where, xs, xs_after, traced.row_changes)
        return hand_over(step.where, init, carry, traced.changes)

    return Finished(
        out.num_steps,
        last[0] if last else None,
        spec.unpack(restore_weak(carry, traced.carry_avals)),
        references.write_back(ys, walked),
        checks,
        hand_over_all,
    )


def _refuse_other_derivative(step: Step, loop_spec: LoopSpec, has_references: bool) -> None:
    """Raise where a kind cannot give a loop another derivative."""
    kind = loop_spec.kind.without_functions()
    if kind.derivative != "exact" and loop_spec.lanes.is_free:
        raise NotImplementedError(derivative_message(f"{loop_spec.name}(lanes='free')", kind))
    if kind.derivative != "exact" and has_references:
        raise NotImplementedError(derivative_and_references_message(step.where, kind))


def _walked(extent: Extent, reverse: bool, num_steps: Any) -> jax.Array:
    """Which rows the loop has been at."""
    rows = jnp.arange(extent.capacity or 0, dtype=jnp.int32)
    return (rows < extent.high) & (rows >= extent.high - num_steps) if reverse else rows < num_steps


def first_condition(step: Step, goes_on: Callable[[Any], Any], spec: Spec, arrays: list[Any]) -> tuple[Any, list[Any]]:
    """Whether to take the first step, and the carry after asking: a condition may change NNX objects in it."""
    given = spec.unpack(arrays)
    carry, objects = thaw_numbered(given)
    first = goes_on(carry)
    if not objects:
        return first, arrays
    where = f"cond_fun, which is called before {step.where},"
    carry, _ = take_back(where, given, objects, carry)
    return first, match_carry(where, given, spec, carry)


def _pad(y: jax.Array, rows: int) -> jax.Array:
    """Zero rows for those beyond a static bound below the capacity."""
    missing = rows - y.shape[0]
    return jnp.pad(y, [(0, missing), *[(0, 0)] * (y.ndim - 1)]) if missing else y


def loop_spec_of(
    options: arguments.Options, extent: Extent, function: Any, reverse: bool = False, unroll: int = 1
) -> LoopSpec:
    """The rows that a loop walks, and how, from what the user has given."""
    reporter = options.reporter(function)
    return LoopSpec(options.name, extent, reverse, unroll, options.kind, options.lanes, options.throw, reporter)


def finish(options: arguments.Options, extent: Extent, done: Finished) -> tuple[Any, Any, LoopInfo]:
    """The carry, the rows and the numbers of a loop, with its run-time checks attached."""
    over, goes_on = extent.over_limit, done.goes_on
    if over is True and goes_on is None and options.throw:
        raise ValueError(arguments.limit_message(options.name, options.max_steps))
    reached = over if goes_on is None or over is False else over & goes_on
    checks, call = list(done.checks), f"loopax.{options.name}"
    if not options.throw:
        for check in extent.checks:
            reached = reached | check.failed
    if options.throw:
        checks += extent.checks
        if reached is not False:
            checks.append(Check.of(call, reached, arguments.limit_problem(options.max_steps)))
        if options.key_data is not None and extent.bound is None:
            checks.append(Check.of(call, done.num_steps >= MOST_STEPS, arguments.OUT_OF_KEYS))
    result = done.carry, done.ys, LoopInfo(done.num_steps, jnp.asarray(reached))
    carry, ys, loop_info = settle(result, checks)
    return done.hand_over(carry), thaw(ys), loop_info
