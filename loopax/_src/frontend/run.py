"""Running a loop on a user's pytrees: the traced step becomes a loop of the core, and its results pytrees again.

Outside of `jax.jit` a loop is compiled as one program. So it moves no constants to the device, and JAX keeps what its
transformations make of the program from one call to the next.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import core as core_types
from jax.core import Tracer
from jaxtyping import PyTree

from loopax._src import core
from loopax._src import jax_internals as jaxi
from loopax._src.core.finite import Finite
from loopax._src.core.ir.lanes import Free, Lockstep
from loopax._src.core.ir.loop import NO_STOP
from loopax._src.core.jaxpr.util import MOST_STEPS, given_once, padded, split_list
from loopax._src.frontend import options as arguments
from loopax._src.frontend import references as refs
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.finite import Backward, Broken, Watched
from loopax._src.frontend.in_python import PythonSteps
from loopax._src.frontend.key_reuse import KeyUse, note_key_use, with_kept_keys
from loopax._src.frontend.run_time_checks import Check, KindCheck, note_watched, settle
from loopax._src.frontend.steps import always, first_condition, scan_step
from loopax._src.frontend.trace import Findings, FirstCondition, Step, StepBack, trace_promoting
from loopax._src.frontend.written_rows import Outputs, hand_over_rows, returning_written
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun
from loopax._src.nnx.functional import freeze, hand_over, refuse_lost_changes, roots, thaw
from loopax._src.pytrees.leaves import LoopInfo, Spec, pack, restore_weak
from loopax._src.pytrees.static import Called

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
class LoopResults:
    """The results of a loop on pytrees, NNX objects in them frozen."""

    num_steps: Any
    goes_on: Any  # None: the loop has no condition
    carry: Any
    ys: Any
    checks: list[Check]
    hand_over: Callable[[Any], Any]  # from the carry to what the user gets; NNX objects in xs are changed too
    broken: Broken | None = None
    arrays: Sequence[Any] = ()  # of the carry

    def how_it_broke(self, finite: Finite | None) -> tuple[Any, ...]:
        """What a `LoopInfo` says of that; where no number could break, that none did."""
        if finite is None:
            return ()
        if self.broken is None:
            return jaxi.zeros(_BOOL), jnp.int32(-1), jnp.int32(-1)
        return self.broken.is_broken, self.broken.step, self.broken.leaf


@dataclass(frozen=True)
class _ArrayResults:
    """The results of a loop as arrays."""

    num_steps: Any
    goes_on: Any
    carry: list[Any]  # with the weak types of the body's results
    spec: Spec  # of the carry
    ys: list[Any]
    found: Findings
    checks: Sequence[Check] = ()
    key_use: KeyUse | None = None
    watched: Watched | None = None
    stop: Sequence[Any] = ()  # of a loop that is watched


# Compiled, so that the numbers are no arguments that are moved to the device.
_and_true = jax.jit(lambda goes_on: True & goes_on, inline=True)  # the texts of stored runs contain it (`durable/`)
_has_no_keys = jax.jit(lambda num_steps: num_steps >= MOST_STEPS, inline=True)


@dataclass
class UserLoop:
    """A loop that a user calls. `goes_on(extras, init)` says whether to take the first step."""

    step: Step
    options: arguments.Options
    extent: Extent
    extras: Sequence[Any]
    init: Any
    xs: Any = None
    goes_on: FirstCondition | None = None  # None: the loop has no condition
    references: Mapping[int, Any] = field(default_factory=dict)  # whose values are among xs: `written_rows.py`
    branch: str = ""  # the function of a `cond` or a `switch` that the loop calls
    used_keys: list[Any] = field(default_factory=list)  # PRNG keys that other branches have consumed
    begun: Sequence[Any] | None = None  # the arrays of the first carry, if that is not `init`

    def __post_init__(self) -> None:
        """Freeze, and check: NNX objects become pytrees here, once, and objects again in what is handed over."""
        options = self.options
        self.step = replace(self.step, finite=options.finite)
        self.frozen, self.frozen_xs = freeze(self.init), freeze(self.xs)
        if self.references or roots(self.xs):
            self.step = returning_written(self.step, self.references, self.extent.capacity is not None)
        self.x_arrays, self.x_spec = pack(self.frozen_xs)
        refs.refuse_references_in(_INITIAL.get(options.name, f"{options.name}(init_val=...)"), self.frozen)
        self.derivative = options.derivative and core.kept(options.derivative)
        kind, is_fixed = options.kind, self.extent.fixed and self.goes_on is None
        if is_fixed and options.finite is not None:  # it may break, and then takes fewer steps
            kind, is_fixed = kind._where_steps_may_break(), False
        # What the program keeps of the kind; and as in `core.LoopFacts`.
        self.kind = core.kept(kind) if self.derivative else core.checked_kind(kind, self.extent.bound)
        self.is_fixed = is_fixed
        self.reporter = options.reporter(self.step.called.functions[0])

    def run(self) -> LoopResults:
        """Run it. Who calls a branch attaches the checks."""
        if jaxi.runs_in_python() and self.derivative is None:
            return self._in_python()
        return self._as_pytrees(self._traced(self.frozen, self.extent, self.goes_on, self.begun))

    def finished(self) -> tuple[Any, Any, LoopInfo]:
        """Run it: the carry, the rows and the numbers of the loop, with its run-time checks attached."""
        done, options, extent = self.run(), self.options, self.extent
        over, goes_on = extent.over_limit, done.goes_on
        broken = done.broken
        if over is True and goes_on is None and options.throw and broken is None:
            raise ValueError(arguments.limit_message(options.name, options.max_steps))
        reached = over if goes_on is None or over is False else _and_true(goes_on) if over is True else over & goes_on
        if broken is not None and reached is not False:
            reached &= ~broken.is_broken
        checks, call = list(done.checks), f"loopax.{options.name}"
        if options.throw:
            checks += extent.checks
            if reached is not False:
                checks.append(Check.of(call, reached, arguments.limit_problem(options.max_steps)))
            if broken is not None:
                checks.append(broken.check(call, done.arrays))
            if options.key_data is not None and extent.bound is None:
                checks.append(Check.of(call, _has_no_keys(done.num_steps), arguments.OUT_OF_KEYS))
        else:
            for check in extent.checks:
                reached = reached | check.failed
        if isinstance(reached, bool):
            reached = ~jaxi.zeros(_BOOL) if reached else jaxi.zeros(_BOOL)
        info = LoopInfo(done.num_steps, reached, *done.how_it_broke(options.finite))
        carry, ys, loop_info = settle((done.carry, done.ys, info), checks, info=info)
        return done.hand_over(carry), thaw(ys), loop_info

    def _traced(
        self, init: Any, extent: Extent, goes_on: FirstCondition | None, begun: Sequence[Any] | None = None
    ) -> _ArrayResults:
        """Trace the step, and run the loop from a carry (frozen) on. `begun`: the arrays of the start, if others."""
        step, options, extras = self.step, self.options, self.extras
        traced, arrays, spec = trace_promoting(step, extras, init, self.x_spec.rows(), goes_on)
        note_key_use(traced.key_use, init, self.frozen_xs, self.used_keys)
        if any(one is other for one in self.references.values() for other in traced.references):
            raise ValueError(
                f"{step.where} closes over a mutable array (`jax.new_ref`) that is among the xs as well. Give it once: "
                "as xs, or closed over and indexed by the row."
            )
        if self.derivative and traced.references:
            raise NotImplementedError(
                f"{step.where} reads or writes a mutable array (a `jax.Ref`), which derivative={self.derivative!r} "
                "does not take. Pass its value through the carry."
            )

        first, first_consts = traced.first or (None, [])
        if goes_on is not None and first is None:
            is_first, arrays = first_condition(step.where, goes_on, extras, spec, arrays)
            first_consts = [is_first]
        values = [reference[...] for reference in traced.references]
        watched, (more_consts, num_stop) = traced.watched, traced.num_watch
        is_predicated = goes_on is not None or watched is not None
        num_go, num_flags = int(is_predicated), sum(traced.flags.sizes)
        watch = None
        if options.throw and (options.finite is not None or traced.watches_back):
            watch = Backward(f"loopax.{options.name}", True)
            note_watched()
        num_carry = num_go + len(arrays) + num_flags + len(values) + num_stop
        loop = core.Loop(
            given_once(traced.body),
            num_consts=len(traced.closed_over) + len(extras) + more_consts,
            num_carry=num_carry,
            bound=extent.bound,
            reverse=extent.reverse,
            predicated=is_predicated,
            stop=num_carry - num_stop if num_stop else None,
            watch=watch,
            unroll=extent.unroll,
            kind=self.kind,
            derivative=self.derivative,
            is_fixed=self.is_fixed,
            bound_is_loose=extent.bound_is_loose,
            inverse=traced.inverse and given_once(traced.inverse),
            lanes=Lockstep() if isinstance(options.lanes, Free) else options.lanes,
            reporting=self.reporter and core.Reporting(self.reporter),
            debug_info=core.DebugInfo(
                options.name, self.kind, options.lanes, self.is_fixed, traced.names, extent.bound, branch=self.branch
            ),
        )
        # Before: two limits. After: one that is known now is a part of the program, another one is an operand of it.
        low, high = (limit if isinstance(limit, int) else None for limit in (extent.low, extent.high))
        limits = extent.low if low is None else None, extent.high if high is None else None
        starts = [(begun or arrays)[i] for i in watched.starts] if watched else []
        given = *limits, first_consts, [*traced.closed_over, *extras], arrays, values, self.x_arrays, starts
        is_free = isinstance(options.lanes, Free)
        program = _LoopProgram(
            loop, is_free, low, high, first, len(extras), len(arrays), num_flags, extent.capacity or 0, watched
        )

        def user_carry(leaves: Sequence[Any]) -> Any:
            return thaw(spec.unpack(leaves[num_go:][: len(arrays)]))

        def run_now() -> core.Outcome:
            adds_no_checks = type(options.kind)._run is core.Kind._run
            if options.derivative is None and adds_no_checks and jaxi.runs_eagerly():
                return _compiled(program, *given)
            operands = program.operands(*given)
            if is_free:
                return program.with_all_rows(core.run_free(loop, *operands))
            checked = KindCheck(f"loopax.{options.name}", options.throw)
            run_loop, is_fixed = core.run_with_tape, self.is_fixed
            call = core.LoopCall(loop, operands, is_fixed, step.where, user_carry, checked, run_loop)
            out = core.run_by(options.derivative, call) if options.derivative else call.run()
            return program.with_all_rows(out)

        out = self.reporter.watch(run_now) if self.reporter else run_now()
        sizes = [num_go, len(arrays), num_flags, len(values)]
        go, carry, flags, values, stop = split_list(out.carry, sizes)
        for reference, value in zip(traced.references, values, strict=True):
            refs.overwrite(reference, value)
        carry, go = restore_weak(carry, traced.carry_avals), go[0] if goes_on is not None else None
        found, checks = traced.found, traced.flags.checks(flags)
        return _ArrayResults(out.num_steps, go, carry, spec, out.ys, found, checks, traced.key_use, watched, stop)

    def _as_pytrees(self, ended: _ArrayResults) -> LoopResults:
        """The results as pytrees."""
        extent, found, step = self.extent, ended.found, self.step
        ys = found.y_spec.unpack(restore_weak(ended.ys, found.y_spec.avals))
        ys, written = (ys.y, dict(zip(ys.places, ys.written, strict=True))) if isinstance(ys, Outputs) else (ys, {})

        def hand_over_all(carry: Any) -> Any:
            if written:
                refuse_lost_changes(step.where, self.init, found.changes, self.xs, written)
                number = jnp.arange(extent.capacity or 0, dtype=jnp.int32)
                is_taken = number >= extent.high - ended.num_steps if extent.reverse else number < ended.num_steps
                walked = (number < extent.high) & is_taken if extent.reverse else is_taken
                hand_over_rows(step.where, self.xs, self.frozen_xs, self.references, written, walked)
            return hand_over(step.where, self.init, carry, found.changes)

        return LoopResults(
            ended.num_steps,
            ended.goes_on,
            with_kept_keys(ended.key_use, self.frozen, ended.spec.unpack(ended.carry)),
            ys,
            list(ended.checks),
            hand_over_all,
            ended.watched and Broken(ended.watched, ended.stop, ended.num_steps),
            ended.carry,
        )

    def _in_python(self) -> LoopResults:
        """Take steps in Python; a traced loop takes those that Python cannot, or gives types where there are none."""
        extent, x_rows = self.extent, [jaxi.keep_bits(lambda x: x[: self.extent.bound], x) for x in self.x_arrays]
        steps = PythonSteps(self.step, extent, self.extras, x_rows, self.x_spec.rows(), *pack(self.frozen))
        steps.begun = steps.carry
        take = partial(steps.take, self.goes_on, self.reporter)
        self.reporter.watch(take) if self.reporter else take()
        if steps.found is not None and steps.is_over:
            number, ys = jnp.int32(len(steps.ys)), steps.written()
            found = steps.found
            return self._as_pytrees(
                _ArrayResults(
                    number, steps.goes_on, steps.carry, steps.spec, ys, found, watched=steps.watched, stop=steps.stop
                )
            )
        condition = None if self.goes_on is None else lambda *_: steps.goes_on
        last = steps.spec.unpack(steps.carry)
        try:
            rest = self._traced(last, steps.rest, condition, steps.begun)
        except _NOT_TRACEABLE as error:
            if not steps.is_over:
                raise
            if extent.capacity is not None:
                error.add_note(
                    f"Note of loopax: {self.step.where} is not called, but traced, as the loop takes no steps: "
                    "for the types of its rows of outputs."
                )
                raise
            # A loop that takes no steps and has no rows needs no types of a step.
            has_objects = bool(roots(self.init))
            hand_over = lambda carry: self.init if has_objects else carry  # noqa: E731
            return LoopResults(jnp.int32(0), steps.goes_on, last, None, [], hand_over)
        if steps.found is not None:
            ys, found = steps.written(rest.ys), rest.found.after(steps.found)
            rest = replace(rest, num_steps=rest.num_steps + len(steps.ys), ys=ys, found=found)
        return self._as_pytrees(rest)


@dataclass(frozen=True)
class _LoopProgram:
    """A loop as a function of arrays: the loop, and the static facts about its operands."""

    loop: core.Loop
    is_free: bool
    low: int | None
    high: int | None
    first: ClosedJaxpr | None  # (*closes over, *extras, *carry) -> whether to take the first step
    num_extras: int
    num_arrays: int  # of the user's carry
    num_flags: int
    capacity: int  # rows of ys
    watched: Watched | None = None

    def operands(
        self,
        low: Any,  # None where the program knows it
        high: Any,  # likewise
        go: Sequence[Any],  # what the condition closes over, or whether to take the first step
        consts: Sequence[Any],  # what the body closes over, and behind it `extras` of a step
        carry: Sequence[Any],
        references: Sequence[Any],  # the values of mutable arrays that the body closes over
        xs: Sequence[Any],
        starts: Sequence[Any],  # the arrays at the start in which some elements may be not finite
    ) -> core.LoopOperands:
        """The operands of the loop."""
        loop, stop = self.loop, []
        low = low if self.low is None else jnp.int32(self.low)
        high = high if self.high is None else jnp.int32(self.high)
        if self.first is not None:
            go = jaxpr_as_fun(self.first)(*go, *consts[len(consts) - self.num_extras :], *carry)
        if self.watched is not None:
            go = go or [low < high]
            consts = [*consts, *map(self.watched.allowed, starts), low + 1 if loop.reverse else high]
            stop = [jaxi.vary_like(jnp.int32(x), loop.body.out_avals[loop.stops[0]]) for x in NO_STOP]
        if loop.predicated:
            go = [jaxi.vary_like(go[0], loop.body.out_avals[0])]
        first_flag = len(go) + self.num_arrays
        flags = [jaxi.zeros(aval) for aval in loop.body.out_avals[first_flag : first_flag + self.num_flags]]
        xs = [jaxi.keep_bits(lambda x: x[: loop.bound], x) for x in xs]
        return core.LoopOperands(low, high, consts, [*go, *carry, *flags, *references, *stop], xs)

    def with_all_rows(self, out: core.Outcome) -> core.Outcome:
        """Results with zero rows for those beyond a static bound below the capacity."""
        missing = [self.capacity - y.shape[0] for y in out.ys]
        return out._replace(ys=[padded(y, more) if more else y for y, more in zip(out.ys, missing, strict=True)])


@partial(jax.jit, static_argnums=0)
def _compiled(program: _LoopProgram, *given: Any) -> core.Outcome:
    """Run a loop with the derivative that its kind's plan gives."""
    loop, operands = program.loop, program.operands(*given)
    out = core.run_free(loop, *operands) if program.is_free else core.run_with_tape(loop, operands)
    return program.with_all_rows(out)


def run_scan(
    words: arguments.Words,  # of `scan` itself, or of a rollout
    options: arguments.Options,
    extent: Extent,
    f: Callable[..., tuple[Any, Any]],
    stop: Callable[[Any, Any], Any] | None,
    init: PyTree[Any],
    xs: PyTree[Any],
    called: Called,
    back: StepBack | None,
    references: Mapping[int, Any] | None = None,
    depends_on: Hashable = (),
) -> tuple[tuple[Any, Any], LoopInfo]:
    """Run a scan; `f` and `stop` depend on the functions in `called`, and on `depends_on`.

    `references` are those whose values are among xs.
    """
    is_counted = stop is not None and extent.bound is None and isinstance(extent.high, Tracer)
    call = scan_step(words, options, f, stop, extent.capacity is not None, is_counted, extent.reverse)
    extras, goes_on = options.extras, None if stop is None else always
    if is_counted:  # the length stops the loop, too: it is the first of the extras
        extras, goes_on = [extent.high, *extras], lambda extras, _: extras[0] > 0
        called = called._replace(extras=("length", "key"))
    facts = words.name, extent.capacity is None, options.key_spec, depends_on, is_counted and extent.reverse, is_counted
    step = Step(call, words.where, called, facts, back)
    carry, ys, loop_info = UserLoop(step, options, extent, extras, init, xs, goes_on, references or {}).finished()
    return (carry, ys), loop_info
