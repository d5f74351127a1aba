"""How a reverse sweep is compiled."""

from functools import singledispatch
from typing import Any

from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepOperands
from loopax._src.core.jaxpr.util import stacked
from loopax._src.core.jaxpr.varying_axes import unvarying
from loopax._src.core.lowering.recording import in_two_parts, recording_of
from loopax._src.core.lowering.sweep_binomial import sweep_slots
from loopax._src.core.lowering.sweep_common import Bodies, Track, bodies_of
from loopax._src.core.lowering.sweep_inverse import sweep_inverse
from loopax._src.core.lowering.sweep_large import is_large, stack_of, sweep_large
from loopax._src.core.lowering.sweep_two_level import sweep_blocks
from loopax._src.core.lowering.while_loop import LoopState
from loopax._src.jax_internals import unwritten
from loopax._src.schedule.saving import Blocks, Saving, Slots


def evaluate_sweep(low: Any, high: Any, checkpoint_rows: Any, *operands: Any, **params: Any) -> list[Any]:
    """The meaning of `reverse_sweep_p` as a function of JAX, by which it is run and compiled.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`, results `*carry, *ys`. `init` is
    read only to check an inverse: elsewhere `saved` holds it too, as the first checkpoint.
    """
    sweep = ReverseSweep(**params)
    low, high, checkpoint_rows = map(unvarying, (low, high, checkpoint_rows))
    consts, init, saved, carry, xs = map(list, sweep.operands(operands))
    ys = [unwritten(stacked(aval, sweep.bound or 0)) for aval in sweep.y_avals]
    if sweep.bound == 0:  # there are no rows, and no checkpoints
        return [*carry, *ys]
    track = Track.of(sweep, low, high, checkpoint_rows)
    if sweep.inverse is not None:
        return sweep_inverse(sweep, track, SweepOperands(consts, init, saved, carry, xs))
    progress, recorded = LoopState(carry, ys, low), recording_of(sweep)
    if recorded is None and is_large(sweep) and (parts := in_two_parts(sweep)):
        bodies = bodies_of(sweep, consts, xs, parts)
        stack = stack_of(sweep.saving, sweep.forward_avals.state, track, checkpoint_rows, saved)
        progress = sweep_large(track, bodies, sweep.y_avals, stack, progress)
        return [*progress.carry, *progress.ys]
    bodies = bodies_of(sweep, consts, xs, recorded)
    progress = sweep_from(sweep.saving, track, bodies, checkpoint_rows, saved, progress)
    return [*progress.carry, *progress.ys]


@singledispatch
def sweep_from(
    saving: Saving, track: Track, bodies: Bodies, checkpoint_rows: Any, saved: list[Any], progress: LoopState
) -> LoopState:
    """Walk back through all steps, from what was saved so."""
    raise NotImplementedError(type(saving))


sweep_from.register(Blocks, sweep_blocks)
sweep_from.register(Slots, sweep_slots)
