"""Asking a loop's kind for its plan, where a gradient is taken: here it is known what the derivative needs.

To know it, a step is evaluated partially. Partial evaluation needs a plan itself, so its function `partial_eval` is
handed to what stands here, as `split`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from sys import maxsize
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.core.autodiff.measuring import Linearized, measured, obstacle
from loopax._src.core.ir.kind import GIVE_BOUND, Decided, LoopFacts, Measuring, ResidualFacts, StepFacts
from loopax._src.core.ir.lane_choice import chosen
from loopax._src.core.ir.lanes import Lockstep, Sequential
from loopax._src.core.ir.loop import Loop, LoopInputs, Outcome, loop_p
from loopax._src.core.ir.plan import BlocksThenResiduals, EveryCarry, EveryResidual, Plan
from loopax._src.core.jaxpr.access_order import writes_rows
from loopax._src.core.jaxpr.cost import evaluation, is_function, overhead
from loopax._src.core.jaxpr.util import flatten, num_bytes, select, trace, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, ad, adds_at_places, dce, equations_in, jaxpr_as_fun, keep_bits
from loopax._src.settings import calibration, costs

# A loop made of two, where its gradient stores the residuals of the last steps on the way forward.
#
# The first loop takes the steps that are evaluated again later, in blocks. The second takes the last steps, and
# stores what their derivative needs. The way back begins with these. When it has used them up, replays of the first
# loop have the room.


class Part(NamedTuple):
    """One of the two loops: it takes the rows `start ... start + loop.bound - 1` of the whole one."""

    loop: Loop
    plan: Plan
    start: int

    @property
    def limits(self) -> tuple[Any, Any]:
        """Its first row, and the one behind its last."""
        assert self.loop.bound is not None
        return jnp.int32(0), jnp.int32(self.loop.bound)

    def inputs(self, inputs: LoopInputs) -> LoopInputs:
        """Its operands from those of the whole loop, whose carry it may be given: it begins where the other ends."""
        assert self.loop.bound is not None
        number = self.loop.bound
        rows = partial(lax.slice_in_dim, start_index=self.start, limit_index=self.start + number)
        xs = [
            ad.UndefinedPrimal(x.aval.update(shape=(number, *x.aval.shape[1:])))
            if ad.is_undefined_primal(x)
            else keep_bits(rows, x)
            for x in inputs.xs
        ]
        return inputs._replace(xs=xs)


def in_two(loop: Loop, plan: Plan) -> tuple[Part, Part] | None:
    """The first and the second loop; None: the plan does not ask for two."""
    if not isinstance(plan, BlocksThenResiduals) or loop.bound is None or loop.saving:
        return None
    replayed = loop.bound - plan.recorded
    starts = (plan.recorded, 0) if loop.reverse else (0, replayed)
    first = _part(loop, plan.blocks, replayed, starts[0])
    return first, _part(loop, EveryResidual(plan.reason), plan.recorded, starts[1])


def _part(loop: Loop, plan: Plan, num_steps: int, start: int) -> Part:
    part = loop._replace(
        body=_from_row(loop.body, start) if start else loop.body,
        inverse=None,
        bound=num_steps,
        kind=Decided(plan),
        reporting=loop.reporting and loop.reporting._replace(runs=2 * loop.reporting.runs),
    )
    return Part(part, plan, start)


@weakly_cached
def _from_row(body: ClosedJaxpr, start: int) -> ClosedJaxpr:
    """The body for rows that count from `start`."""
    function = jaxpr_as_fun(body)
    return trace(lambda row, *operands: function(row + start, *operands), body.in_avals)


def joined(loop: Loop, first: Outcome, last: Outcome) -> Outcome:
    """The results of the whole loop from those of its two parts; None for those that are unknown now."""
    rows = zip(last.ys, first.ys, strict=True) if loop.reverse else zip(first.ys, last.ys, strict=True)
    return last._replace(
        num_steps=first.num_steps + last.num_steps,
        ys=[
            None if front is None else keep_bits(lambda *parts: jnp.concatenate(parts), front, back)
            for front, back in rows
        ],
    )


Split = Callable[[Loop, Plan, LoopInputs], Any]  # a loop, its plan, and which inputs are unknown -> a `PartialEval`


@weakly_cached
def plan_of(loop: Loop, unknown: LoopInputs, split: Split) -> Plan:
    """What a gradient of the loop stores, as its kind says; `unknown` marks consts, carry and xs."""
    plan = loop.kind.plan(
        LoopFacts(
            loop.bound,
            loop.is_fixed,
            loop.bound_is_loose,
            length_is_known=not loop.predicated,
            sizes_are_known=num_bytes(loop.body.in_avals) < maxsize,
            share=loop.share,
            writes_rows=writes_rows(loop.body),
            _measure_step=partial(_measure_step, loop, unknown, split),
            _measure_residuals=partial(_measure_residuals, loop, unknown, split),
            _measuring=Measuring(
                partial(_measure_plans, loop, unknown, split),
                partial(obstacle, loop),
                partial(_program, loop.body, flatten(unknown)),
            ),
            ends_early=not loop.is_fixed and (loop.share < 1 or not isinstance(loop.lanes, Lockstep)),
            is_batch=loop.is_batch,
            **_to_come(loop),
        )
    )
    if not isinstance(plan, Plan):
        got = f"the class {plan.__name__}" if isinstance(plan, type) else plan and f"{type(plan).__name__} {plan!r}"
        raise TypeError(
            f"kind={loop.kind!r}: `plan` returned {got}, expected a plan: an object of `Checkpoints`, `EveryCarry`, "
            "`EveryResidual`, `LastCarry` or `NoReverseMode` of `loopax.kinds`."
        )
    if plan.needs_bound and loop.bound is None:
        raise ValueError(
            f"kind={loop.kind!r}: `plan` returned {plan!r}, which stores something for every step, and the loop has no "
            "bound. Set `needs_bound = True` in the class, or return `Checkpoints` where `loop.bound` is None. "
            f"{GIVE_BOUND}"
        )
    return plan


_MANY = 64  # lanes, where their number is not known


def _to_come(loop: Loop) -> dict[str, int]:
    """The lanes that are to be expected where the loop says how they run: that take steps together, or store apart."""
    if isinstance(loop.lanes, Lockstep):
        return {}
    is_alone = isinstance(chosen(loop.lanes, loop.body, loop.num_consts, _MANY), Sequential)
    return {"lanes_apart" if is_alone else "lanes_to_come": _MANY}


def _program(body: ClosedJaxpr, unknown: Sequence[bool]) -> str:
    """The body as a text, without inputs that nobody reads: a loop may have lost them on its way, or not."""
    program, used = dce(body, [True] * len(body.out_avals), False)
    return f"{select(used[1:], unknown)} {program}"


def _measure_plans(
    loop: Loop,
    unknown: LoopInputs,
    split: Split,
    plans: Sequence[Plan],
    step: float,
    deadline: float,
    num_lanes: int,
) -> list[float | None]:
    """Run the gradient as each plan stores it."""
    parts = split(loop, EveryCarry(), unknown)
    return measured(Linearized(loop, parts.unknown, parts.unknown_outputs), plans, step, deadline, num_lanes)


def _measure_step(loop: Loop, unknown: LoopInputs, split: Split, lanes: int) -> StepFacts:
    """Evaluate the loop partially with carries stored."""
    parts = split(loop, EveryCarry(), unknown)
    body, time = parts.known.body, _derivative(loop, parts, len(parts.states), lanes)
    in_function = is_function(body, lanes)
    # A loop in the step runs again before its own derivative, which may evaluate its steps once more.
    inner = [eqn for eqn in body.eqns if eqn.primitive is loop_p]
    if inner and loop.bound is not None:
        again = evaluation(jaxi.replace_jaxpr(body, eqns=inner), lanes, in_function)
        time = max(time, _measure_residuals(loop, unknown, split, lanes).derivative + again)
    step = evaluation(body, lanes, in_function)
    return StepFacts(num_bytes(parts.states), step, overhead(in_function, loop.is_fixed), time)


def _measure_residuals(loop: Loop, unknown: LoopInputs, split: Split, lanes: int) -> ResidualFacts:
    """Evaluate the loop partially with residuals stored."""
    parts = split(loop, EveryResidual(), unknown)
    return ResidualFacts(num_bytes(parts.stored), _derivative(loop, parts, len(parts.stored), lanes))


def _derivative(loop: Loop, parts: Any, num_stored: int, lanes: int) -> float:
    """The time of a step of the sweep: of the linear part, which has as many operations as its transpose.

    So many arrays were stored for it.
    """
    linear, in_function = parts.linear.body, is_function(parts.known.body, lanes)
    adding = [eqn for eqn in equations_in(linear) if adds_at_places(eqn, lanes)] if in_function or lanes > 1 else []
    in_function = in_function and lanes * max(map(jaxi.num_places, adding), default=0) <= jaxi.MOST_WRITES
    time = evaluation(linear, lanes, in_function) + overhead(in_function, loop.is_fixed)
    time += num_stored * calibration().stored
    if lanes > 1:  # each adds up a cotangent of its own for what lanes share, unless it adds to few places
        shared = [prod(aval.shape) for aval in select(parts.unknown.consts, loop.input_avals.consts)]
        read = {eqn.invars[0]: prod(eqn.invars[0].aval.shape) for eqn in adding}
        time += lanes * costs().elementwise * max(sum(shared) - sum(read.values()), 0)
    return time
