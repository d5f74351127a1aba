"""Running a loop on a user's pytrees: the traced step becomes a loop of the core, and its results pytrees again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import core as core_types

from loopax._src import core
from loopax._src.core.jaxpr.util import MOST_STEPS, split_list
from loopax._src.frontend import options as arguments
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.in_python import PythonSteps, take_steps
from loopax._src.frontend.key_reuse import KeyUse, note_key_use, with_kept_keys
from loopax._src.frontend.options import SCAN, no_capacity
from loopax._src.frontend.program import Given, Program, Results, compiled
from loopax._src.frontend.references import NO_REFERENCES, ReferenceRows, overwrite, refuse_references_in
from loopax._src.frontend.runtime_checks import Check, KindCheck, settle
from loopax._src.frontend.steps import first_condition
from loopax._src.frontend.trace import FirstCondition, Found, Step, Traced, trace_promoting
from loopax._src.jax_internals import keep_bits, runs_eagerly, runs_in_python, zeros
from loopax._src.kinds import Kind
from loopax._src.lanes import Lanes
from loopax._src.messages import derivative_and_references_message, derivative_message
from loopax._src.nnx.functional import freeze, roots, thaw
from loopax._src.nnx.writeback import hand_over, refuse_lost_changes
from loopax._src.progress import Reporter
from loopax._src.pytrees.leaves import Spec, pack, restore_weak
from loopax._src.pytrees.types import LoopInfo

_BOOL = core_types.ShapedArray((), jnp.bool_)
# The user's argument for the first carry, in errors; elsewhere it is `init_val`. That of a rollout has a field `state`.
_INITIAL = {"scan": "scan(init=...)", "rollout": "rollout"}
# A body that asks a value for what only a number has.
_NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


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
    used_keys: list[Any] = field(default_factory=list)  # that other branches have consumed


@dataclass(frozen=True)
class Finished:
    """The results of a loop on pytrees, NNX objects in them frozen."""

    num_steps: Any
    goes_on: Any
    carry: Any
    ys: Any
    checks: list[Check]
    hand_over: Callable[[Any], Any]  # from the carry to what the user gets; NNX objects in xs are changed too


@dataclass(frozen=True)
class _Ended:
    """The results of a loop as arrays."""

    num_steps: Any
    goes_on: Any  # None: the loop has no condition
    carry: list[Any]  # with the weak types of the body's results
    spec: Spec  # of the carry
    ys: list[Any]  # those that the body wrote to rows of xs first
    found: Found
    checks: Sequence[Check] = ()
    key_use: KeyUse | None = None


def run(
    step: Step,
    loop_spec: LoopSpec,
    extras: Sequence[Any],
    init: Any,
    xs: Any,
    goes_on: FirstCondition | None,
    references: ReferenceRows = NO_REFERENCES,
) -> Finished:
    """Run a loop; `goes_on(extras, init)` says whether to take the first step (None: the loop has no condition).

    `references` are those whose values are among xs.
    """
    extent, kind = loop_spec.extent, loop_spec.kind
    frozen = freeze(init)
    refuse_references_in(_INITIAL.get(loop_spec.name, f"{loop_spec.name}(init_val=...)"), frozen)
    storage = core.Asked.of(kind, extent.bound, extent.fixed and goes_on is None, extent.bound_is_loose)
    call = _Call(references.step(step), loop_spec, extras, init, xs, *pack(freeze(xs)), references, storage)
    if runs_in_python() and kind.derivative == "exact":
        return _run_in_python(call, frozen, goes_on)
    return call.finished(call.traced(frozen, extent, goes_on))


@dataclass(frozen=True)
class _Call:
    """A call of a loop."""

    step: Step
    loop_spec: LoopSpec
    extras: Sequence[Any]
    init: Any  # the user's
    xs: Any
    x_arrays: list[Any]
    x_spec: Spec
    references: ReferenceRows
    storage: core.Asked

    def check(self, found: Found) -> None:
        """Refuse what a step does and a loop cannot."""
        refuse_lost_changes(self.step.where, self.init, found.changes, self.xs, found.row_changes)
        if self.loop_spec.extent.capacity is None and any(found.rows.written):
            raise no_capacity(SCAN, "NNX objects in xs", "set up what they hold before the scan")

    def traced(self, init: Any, extent: Extent, goes_on: FirstCondition | None) -> _Ended:
        """Trace the step, and run the loop from a carry (frozen) on."""
        step, loop_spec, extras = self.step, self.loop_spec, self.extras
        traced, arrays, spec = trace_promoting(step, extras, init, self.x_spec.rows(), goes_on)
        note_key_use(traced.key_use, (init, spec), (self.xs, self.x_spec), loop_spec.used_keys)
        self.check(traced.found)
        self.references.refuse_closed_over(step.where, traced.references)
        _refuse_other_derivative(step, loop_spec, bool(traced.references))
        first, first_consts = traced.first or (None, [])
        if goes_on is not None and first is None:
            is_first, arrays = first_condition(step.where, goes_on, extras, spec, arrays)
            first_consts = [is_first]
        values = [reference[...] for reference in traced.references]
        num_flags, predicated = len(traced.messages), goes_on is not None
        loop = self._loop(traced, extent, predicated, int(predicated) + len(arrays) + num_flags + len(values))
        (low, first_row), (high, end_row) = map(_known, (extent.low, extent.high))
        given = Given(first_row, end_row, first_consts, [*traced.closed_over, *extras], arrays, values, self.x_arrays)
        is_free, capacity = loop_spec.lanes.is_free, extent.capacity
        program = Program(loop, is_free, low, high, first, len(extras), len(arrays), num_flags, capacity)

        def user_carry(leaves: Sequence[Any]) -> Any:
            return thaw(spec.unpack(leaves[int(predicated) :][: len(arrays)]))

        def run_now() -> Results:
            if core.runs_plainly(loop_spec.kind) and runs_eagerly():
                return compiled(program, given)
            operands = program.operands(given)
            if is_free:
                return program.results(core.run_free(loop, *operands))
            checked = KindCheck(f"loopax.{loop_spec.name}", loop_spec.throw)
            run_loop, is_fixed = core.run_with_tape, self.storage.is_fixed
            call = core.LoopCall(loop, operands, is_fixed, step.where, user_carry, checked, run_loop)
            return program.results(core.run_by(loop_spec.kind, call))

        out = loop_spec.reporter.watch(run_now) if loop_spec.reporter else run_now()
        for reference, value in zip(traced.references, out.references, strict=True):
            overwrite(reference, value)
        checks = [Check(flag, message) for flag, message in zip(out.flags, traced.messages, strict=True)]
        carry = restore_weak(out.carry, traced.carry_avals)
        return _Ended(out.num_steps, out.goes_on, carry, spec, out.ys, traced.found, checks, traced.key_use)

    def _loop(self, traced: Traced, extent: Extent, predicated: bool, num_carry: int) -> core.Loop:
        """The loop of a traced step."""
        loop_spec = self.loop_spec
        return core.Loop(
            traced.body,
            num_consts=len(traced.closed_over) + len(self.extras),
            num_carry=num_carry,
            bound=extent.bound,
            reverse=loop_spec.reverse,
            predicated=predicated,
            unroll=loop_spec.unroll,
            storage=self.storage,
            inverse=traced.inverse,
            stages=loop_spec.lanes.stages,
            reporting=loop_spec.reporter and core.Reporting(loop_spec.reporter),
            debug_info=core.DebugInfo(
                loop_spec.name,
                loop_spec.kind.without_functions(),
                loop_spec.lanes,
                self.storage.is_fixed,
                extent.bound_is_loose,
                traced.names,
                extent.bound,
                branch=loop_spec.branch,
            ),
        )

    def finished(self, ended: _Ended) -> Finished:
        """The results as pytrees."""
        extent, found, step = self.loop_spec.extent, ended.found, self.step
        rows, ys = split_list(ended.ys, [sum(found.rows.written)])
        walked: Any = _walked(extent, self.loop_spec.reverse, ended.num_steps) if rows or self.references else None
        xs_after = found.rows.xs_after(self.x_arrays, rows, walked)
        ys = found.y_spec.unpack(restore_weak(ys, found.y_spec.avals))

        def hand_over_all(carry: Any) -> Any:
            hand_over(step.where, self.xs, xs_after, found.row_changes)
            return hand_over(step.where, self.init, carry, found.changes)

        return Finished(
            ended.num_steps,
            ended.goes_on,
            with_kept_keys(ended.key_use, self.init, ended.spec, ended.spec.unpack(ended.carry)),
            self.references.write_back(ys, walked),
            list(ended.checks),
            hand_over_all,
        )


def _run_in_python(call: _Call, init: Any, goes_on: FirstCondition | None) -> Finished:
    """Take steps in Python; a traced loop takes those that Python cannot, or says what one without steps returns."""
    loop_spec, rows, reporter = call.loop_spec, call.x_spec.rows(), call.loop_spec.reporter
    extent = loop_spec.extent
    x_rows = [keep_bits(lambda x: x[: extent.bound], x) for x in call.x_arrays]

    def take() -> PythonSteps:
        return take_steps(call.step, extent, loop_spec.reverse, call.extras, init, x_rows, rows, goes_on, reporter)

    steps = reporter.watch(take) if reporter else take()
    if steps.found is not None and steps.is_over:
        call.check(steps.found)
        number, ys = jnp.int32(steps.number), steps.written()
        return call.finished(_Ended(number, steps.goes_on, steps.carry, steps.spec, ys, steps.found))
    condition = None if goes_on is None else lambda *_: steps.goes_on
    try:
        rest = call.traced(steps.spec.unpack(steps.carry), steps.rest, condition)
    except _NOT_TRACEABLE as error:
        if not steps.is_over:
            raise
        if extent.capacity is not None:
            error.add_note(
                f"Note of loopax: {call.step.where} is not called, but traced, as the loop takes no steps: "
                "for the types of its rows of outputs."
            )
            raise
        return _without_steps(call, steps)
    if steps.found is not None:
        ys, found = steps.written(rest.ys), rest.found.after(steps.found)
        rest = replace(rest, num_steps=rest.num_steps + steps.number, ys=ys, found=found)
    return call.finished(rest)


def _without_steps(call: _Call, steps: PythonSteps) -> Finished:
    """What a loop returns that takes no steps and has no rows, if its step cannot be traced for the types."""
    carry, has_objects = steps.spec.unpack(steps.carry), bool(roots(call.init))
    hand_over = lambda carry: call.init if has_objects else carry  # noqa: E731
    return Finished(jnp.int32(0), steps.goes_on, carry, None, [], hand_over)


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


def _known(limit: Any) -> tuple[int | None, Any]:
    """A limit where it is known now, and where it is an array."""
    return (limit, None) if isinstance(limit, int) else (None, limit)


def loop_spec_of(
    options: arguments.Options, extent: Extent, function: Any, reverse: bool = False, unroll: int = 1
) -> LoopSpec:
    """The rows that a loop walks, and how, from what the user has given."""
    reporter = options.reporter(function)
    return LoopSpec(options.name, extent, reverse, unroll, options.kind, options.lanes, options.throw, reporter)


@partial(jax.jit, inline=True)
def _and_true(goes_on: Any) -> jax.Array:
    """Return `goes_on`, by the operation that the texts of stored runs contain (`durable/`)."""
    return True & goes_on


@partial(jax.jit, inline=True)
def _has_no_keys(num_steps: Any) -> jax.Array:
    """Whether step counts have come to their end."""
    return num_steps >= MOST_STEPS


def finish(options: arguments.Options, extent: Extent, done: Finished) -> tuple[Any, Any, LoopInfo]:
    """The carry, the rows and the numbers of a loop, with its run-time checks attached."""
    over, goes_on = extent.over_limit, done.goes_on
    if over is True and goes_on is None and options.throw:
        raise ValueError(arguments.limit_message(options.name, options.max_steps))
    reached = over if goes_on is None or over is False else _and_true(goes_on) if over is True else over & goes_on
    checks, call = list(done.checks), f"loopax.{options.name}"
    if not options.throw:
        for check in extent.checks:
            reached = reached | check.failed
    if options.throw:
        checks += extent.checks
        if reached is not False:
            checks.append(Check.of(call, reached, arguments.limit_problem(options.max_steps)))
        if options.key_data is not None and extent.bound is None:
            checks.append(Check.of(call, _has_no_keys(done.num_steps), arguments.OUT_OF_KEYS))
    if isinstance(reached, bool):
        reached = ~zeros(_BOOL) if reached else zeros(_BOOL)
    result = done.carry, done.ys, LoopInfo(done.num_steps, reached)
    carry, ys, loop_info = settle(result, checks)
    return done.hand_over(carry), thaw(ys), loop_info
