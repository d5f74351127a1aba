"""How a reverse sweep is compiled."""

from typing import Any

from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.util import split_list, stacked
from loopax._src.core.jaxpr.varying_axes import unvarying
from loopax._src.core.lowering.sweep_binomial import sweep_slots
from loopax._src.core.lowering.sweep_common import Track, bodies_of
from loopax._src.core.lowering.sweep_two_level import sweep_blocks
from loopax._src.core.lowering.while_loop import LoopState
from loopax._src.jax_internals import zeros
from loopax._src.schedule import Blocks


def evaluate_sweep(low: Any, high: Any, checkpoint_rows: Any, *operands: Any, **params: Any) -> list[Any]:
    """The meaning of `reverse_sweep_p` as a function of JAX, by which it is run and compiled."""
    static = ReverseSweep(**params)
    low, high, checkpoint_rows = map(unvarying, (low, high, checkpoint_rows))
    consts, _, saved, carry, xs = split_list(operands, static.sizes)
    ys = [zeros(stacked(aval, static.bound or 0)) for aval in static.y_avals]
    if static.bound == 0:  # there are no rows, and no checkpoints
        return [*carry, *ys]
    track = Track.of(static, low, high, checkpoint_rows)
    bodies, progress = bodies_of(static, consts, xs), LoopState(carry, ys, low)
    if isinstance(static.saving, Blocks):
        progress = sweep_blocks(static, track, bodies, static.saving.size, saved, progress)
    else:
        progress = sweep_slots(track, bodies, checkpoint_rows, saved, progress)
    return [*progress.carry, *progress.ys]
