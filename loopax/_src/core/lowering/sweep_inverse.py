"""A reverse sweep by an inverse: `saved` holds the state after the last step, and each step back finds the one before.

The walk back is a loop whose carry is that of the sweep and the state. Each step of it evaluates the inverse, and then
what the sweep does with the state.
"""

from typing import Any

from loopax._src.core.ir.loop import Loop, traversal
from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepOperands
from loopax._src.core.jaxpr.util import split_list, trace, weakly_cached
from loopax._src.core.lowering.loop import evaluate_loop
from loopax._src.core.lowering.sweep_common import Track
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun


def sweep_inverse(sweep: ReverseSweep, track: Track, operands: SweepOperands) -> list[Any]:
    """Walk back through all steps; returns carry and ys."""
    last = track.row(track.num_steps)
    low, high = (last + 1, track.first_row + 1) if sweep.reverse else (track.first_row, last)
    loop = Loop(
        _step_back(sweep),
        num_consts=sweep.num_consts,
        num_carry=sweep.num_carry + sweep.num_state,
        predicated=False,
        **traversal(sweep),
    )
    loop = loop._replace(reverse=not sweep.reverse)
    leaves = [*operands.consts, *operands.carry, *(x[0] for x in operands.saved), *operands.xs]
    _, carry, start, ys = split_list(
        evaluate_loop(low, high, *leaves, **loop._asdict()), [1, sweep.num_carry, sweep.num_state]
    )
    drift, last_state = sweep.saving.drift, [x[0] for x in operands.saved]
    return [*carry, *ys] if drift is None else drift(operands.init, start, last_state, [*carry, *ys])


@weakly_cached
def _step_back(sweep: ReverseSweep) -> ClosedJaxpr:
    """(row, *consts, *carry, *state after, *x) -> (*carry, *state before, *y)."""
    inverse, backward = jaxpr_as_fun(sweep.inverse), jaxpr_as_fun(sweep.backward)
    avals = sweep.backward_avals

    def step(row: Any, *operands: Any) -> list[Any]:
        given = sweep.of_backward(operands)
        before = given._replace(state=inverse(row, *sweep.forward_inputs(given)))
        out = sweep.outputs(backward(row, *sweep.backward_inputs(before)))
        return [*out.carry, *before.state, *out.ys]

    return trace(step, [sweep.step.in_avals[0], *sweep.backward_inputs(avals)])
