"""`jax.checkpoint` of programs with loops, and dead-code elimination inside loops."""

from collections.abc import Callable, Sequence
from operator import not_
from typing import Any

from loopax._src.core.autodiff.partial_eval import known_loop, prune, unknown_outputs
from loopax._src.core.autodiff.sweep import needs, sweep_fixpoint, with_inputs
from loopax._src.core.ir.annotations import strip_progress_of_equation, strip_progress_of_params
from loopax._src.core.ir.loop import Loop, LoopOutputs, part_of_inverse
from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepOperands
from loopax._src.core.jaxpr.util import either, flatten, invert, map_leaves, select
from loopax._src.jax_internals import Literal, Primitive, happens


def leave_whole(
    eqn: Any, instantiated: Sequence[bool], known: Any = None, unknown_outputs: Sequence[bool] | None = None
) -> Any:
    """The answer of a rule that leaves the whole equation for later, without its progress, and runs `known` now."""
    everything = [True] * len(eqn.outvars)
    missing = [v for v, i in zip(eqn.invars, instantiated, strict=True) if not i and not isinstance(v, Literal)]
    return known, strip_progress_of_equation(eqn), unknown_outputs or everything, everything, missing


def evaluate_again(primitive: Primitive) -> Callable[..., list[Any]]:
    """How `jax.checkpoint` evaluates a loop again, with JAX's flag `jax_remat3`: all of it, without its progress.

    Nothing that the loop computes is stored, whatever the checkpoint's policy says. A policy sees what stands in the
    checkpointed function; what the gradient of a loop stores is the loop's kind.
    """
    return lambda *operands, **params: primitive.bind(*operands, **strip_progress_of_params(params))


def loop_partial_eval_custom(_: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any) -> Any:
    """Run the known part of a loop in `jax.checkpoint` now, and leave the whole loop for later.

    `unknown` and `instantiated` have a flag for each operand: `low, high, *consts, *carry, *xs`. The answer has five
    parts: the equation to run now, the equation to run later, a flag for each result (is it unknown?), another one
    (does the later equation give it?), and the operands that the later equation also needs. Known results are those of
    the known loop. The later equation runs the whole loop again, because `jax.checkpoint` must store nothing that the
    loop computes. If the number of steps is unknown, nothing runs now.
    """
    loop = Loop(**eqn.params)
    low, high, *flags = unknown
    inputs = map_leaves(bool, loop.inputs(flags))
    outputs = unknown_outputs(loop, inputs)
    if low or high or (loop.predicated and outputs.carry[0]):
        return leave_whole(eqn, instantiated)
    inputs = inputs._replace(carry=outputs.carry)
    known = known_loop(loop, inputs, outputs)
    unknown_in, unknown_out = [False, False, *flatten(inputs)], loop.results_from(False, outputs, False).leaves
    return leave_whole(eqn, instantiated, _part(eqn, invert(unknown_in), invert(unknown_out), known), unknown_out)


def sweep_partial_eval_custom(_: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any) -> Any:
    """Run the known part of a sweep in `jax.checkpoint` now, and leave the whole sweep for later.

    `unknown` and `instantiated` have a flag for each operand: `low, high, checkpoint_rows, *consts, *init, *saved,
    *carry, *xs`. The answer has the parts of that of `loop_partial_eval_custom`, for the same reason.
    """
    sweep = ReverseSweep(**eqn.params)
    if any(unknown[:3]):
        return leave_whole(eqn, instantiated)
    flags = map_leaves(bool, sweep.operands(unknown[3:]))
    inputs, ys = sweep_fixpoint(sweep, flags.inputs(either(flags.init, flags.saved)), typed=False)
    known = with_inputs(sweep, map_leaves(not_, inputs), invert(ys))
    unknown_in = [False, False, False, *flatten(SweepOperands.of(inputs))]
    unknown_out = [*inputs.carry, *ys]
    return leave_whole(eqn, instantiated, _part(eqn, invert(unknown_in), invert(unknown_out), known), unknown_out)


def _part(eqn: Any, used_in: Sequence[bool], used_out: Sequence[bool], static: Loop | ReverseSweep) -> Any:
    """The equation of a part of a loop or a sweep, which has these operands and gives these results."""
    return eqn.replace(
        invars=select(used_in, eqn.invars),
        outvars=select(used_out, eqn.outvars),
        params=static._asdict(),
        effects=(static.body if isinstance(static, Loop) else static.step).effects,
    )


def loop_dce(used: list[bool], *rest: Any) -> Any:
    """Remove from a loop what its used results do not need.

    `used` has a flag for each result: `num_steps, *carry, *ys, *saved, checkpoint_rows`. A leaf of the carry is needed
    if it is used, or if a needed leaf depends on it after some number of steps (`prune`). The predicate is always
    needed: it decides on the number of steps. The answer says which of `low, high, *consts, *carry, *xs` are needed
    (the first two always are), and has the new equation.

    Effects that must happen stay, with all that they need. If there are none, and no result is used, the loop is
    removed. From JAX 0.12 on, JAX also passes the live inputs to this rule, which ignores them.
    """
    eqn = rest[-1]
    loop = Loop(**eqn.params)
    if not any(used) and not happens(eqn.effects):
        return [False] * len(eqn.invars), None
    _, carry, ys, saved, checkpoint_rows = loop.results(used)
    used_of_saved = iter(saved)
    saved_mask = tuple(keep and next(used_of_saved) for keep in loop.saved_mask)
    wanted = either(carry, saved_mask)
    if loop.predicated:
        wanted = (True, *wanted[1:])
    wanted = tuple(keep or place in loop.always_carried for place, keep in enumerate(wanted))
    body, inputs = prune(loop, loop.body, LoopOutputs(wanted, tuple(ys)))
    kept = inputs.carry
    saving = loop.saving if any(saved) or any(checkpoint_rows) else None
    slim = loop._replace(
        body=body,
        inverse=part_of_inverse(loop.inverse, flatten(inputs), kept),
        **loop._replace(saved=saved_mask if saving else ()).kept(kept),
        num_consts=sum(inputs.consts),
        saving=saving,
        debug_info=loop.debug_info and loop.debug_info.renamed(loop.names.keep(*inputs, ys)),
    )
    used_in = [True, True, *flatten(inputs)]
    used_out = [True, *kept, *ys, *saved, *(saving is not None for _ in checkpoint_rows)]
    return used_in, _part(eqn, used_in, used_out, slim)


def sweep_dce(used: list[bool], *rest: Any) -> Any:
    """Remove from a sweep what its used results do not need.

    `used` has a flag for each result: `*carry, *ys`. A leaf of the carry or of the state is needed if it is used, or if
    a needed one depends on it after some number of steps (`needs`). The answer says which of `low, high,
    checkpoint_rows, *consts, *init, *saved, *carry, *xs` are needed (the first three always are), and has the new
    equation. Effects that must happen stay, as in `loop_dce`.
    """
    eqn = rest[-1]
    sweep = ReverseSweep(**eqn.params)
    if not any(used) and not happens(eqn.effects):
        return [False] * len(eqn.invars), None
    carry, ys = sweep.outputs(used)
    keep = needs(sweep, carry, ys)
    slim = with_inputs(sweep, keep, ys)
    used_in = [True, True, True, *flatten(SweepOperands.of(keep))]
    return used_in, _part(eqn, used_in, [*keep.carry, *ys], slim)
