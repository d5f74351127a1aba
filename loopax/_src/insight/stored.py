"""What the gradient of a loop stores, and how often it evaluates the body."""

from dataclasses import dataclass

from loopax._src.core import Loop, Plan
from loopax._src.core.autodiff.jvp import jvp_loop
from loopax._src.core.autodiff.partial_eval import PartialEval, partial_eval
from loopax._src.core.autodiff.planning import plan_of
from loopax._src.core.autodiff.transpose import sweep_of, transposed_step
from loopax._src.core.ir.loop import LoopInputs
from loopax._src.core.jaxpr.util import Mask, merge_lists, num_bytes, select
from loopax._src.core.lowering.recording import recording_of
from loopax._src.insight.schedule_picture import SchedulePicture
from loopax._src.schedule.saving import EveryStep, Last, length_known

# An online schedule of more steps is not followed step by step; it needs at most so many times the evaluations of one
# that knows its length (docs/kinds.md).
_COUNTED, _ONLINE = 100_000, 1.15


@dataclass(frozen=True)
class Stored:
    """What a gradient stores between the forward and the backward pass. Sizes are for one lane.

    Attributes
    ----------
    kind
        The kind in use, such as the one that `Auto` chose.
    reason
        Why `Auto` chose this kind.
    what
        What is stored: `"carries"`, or `"residuals"` (what the derivative of a step needs).
    carries
        The most carries or residuals that are stored, including those of a recomputed block.
    size
        The bytes of one carry, or of the residuals of one step.
    records
        Whether recomputed steps store their residuals in place of carries.
    walks_back
        Whether the inverse of the kind is evaluated once for each step.
    leaves
        Whether each leaf of the carry is stored.
    evaluations
        The most evaluations of the body, forward and gradient together, for as many steps as the bound. None: no bound.

    """

    kind: str
    reason: str
    what: str
    carries: int
    size: int
    records: bool
    walks_back: bool
    leaves: Mask
    evaluations: int | None


def stored_by(loop: Loop, perturbed: Mask) -> Stored:
    """For a loop of which these operands (consts, carry, xs) are perturbed.

    Raises what taking the gradient would: reverse mode that a kind does not have, too little memory for `Auto`.
    """
    given = loop.inputs(perturbed)
    pair, inputs, _ = jvp_loop(loop, LoopInputs(*map(tuple, given)))
    # Of each group, primals are known; of the tangents behind them, those are unknown that are perturbed at the start.
    unknown = LoopInputs(*((*(False for _ in mask), *select(mask, of)) for mask, of in zip(inputs, given, strict=True)))
    plan = plan_of(pair, unknown)
    if plan.error:
        raise plan.error
    pair = pair._replace(storage=plan)
    parts = partial_eval(pair, unknown)
    carries, size = _kept(pair, plan, parts)
    return Stored(
        plan.name,
        plan.reason,
        "residuals" if _keeps_residuals(plan, parts) else "carries",
        carries if size else 0,
        size,
        _records(plan, parts),
        parts.linear.saving == Last(),
        _leaves(parts, loop.num_carry),
        _evaluations(pair, plan, parts),
    )


def _keeps_residuals(plan: Plan, parts: PartialEval) -> bool:
    """Whether rows of residuals are stored: a step that draws for all lanes once more needs carries."""
    return plan.stores_residuals and not parts.known.saving


def _kept(loop: Loop, plan: Plan, parts: PartialEval) -> tuple[int, int]:
    """How many carries or residuals are stored, and the size of one."""
    if _keeps_residuals(plan, parts):
        return loop.bound or 0, num_bytes(parts.stored)
    size = num_bytes(select(parts.states, parts.known.output_avals.carry))
    saving = plan.shown(parts.known.saving)
    if loop.bound is None:
        return saving.rows(None) if saving else 0, size
    stored = (saving or EveryStep()).stored_bytes(loop.bound, size)
    return -(-stored // max(size, 1)), size


def _leaves(parts: PartialEval, num_carry: int) -> Mask:
    """Which primal leaves of the carry are stored: they are known, and stand in front of their tangents."""
    unknown = parts.unknown.carry
    states = merge_lists(unknown, parts.states, (False,) * sum(unknown))
    return tuple(states[:num_carry])


def _evaluations(loop: Loop, plan: Plan, parts: PartialEval) -> int | None:
    steps, saving = loop.bound, plan.shown(parts.known.saving)
    if steps is None:
        return None
    if _keeps_residuals(plan, parts):
        return steps
    if saving is not None and saving.is_counted_slowly and steps > _COUNTED:
        return int(_ONLINE * length_known(saving).evaluations(steps, records=False))
    return SchedulePicture(steps, saving if any(parts.states) else None, _records(plan, parts)).evaluations


def _records(plan: Plan, parts: PartialEval) -> bool:
    """Whether the reverse sweep records residuals; it may leave out ys that have no cotangent."""
    if plan.shown(None) is not None:  # blocks with residuals are planned
        return True
    if parts.linear.saving is None:
        return False
    step = transposed_step(parts.linear, (True,) * len(parts.linear.output_avals.ys))
    return recording_of(sweep_of(parts.linear, step)) is not None
