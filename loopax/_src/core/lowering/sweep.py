"""How a reverse sweep is compiled."""

from typing import Any

import jax

from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.util import split_list, stacked
from loopax._src.core.jaxpr.varying_axes import unvarying
from loopax._src.core.lowering.sweep_binomial import sweep_slots
from loopax._src.core.lowering.sweep_common import Track, bodies_of
from loopax._src.core.lowering.sweep_two_level import sweep_blocks
from loopax._src.core.lowering.while_loop import LoopState
from loopax._src.jax_internals import mlir, zeros
from loopax._src.schedule import Blocks


def _run(low: Any, high: Any, checkpoint_rows: Any, *operands: Any, **params: Any) -> list[Any]:
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


_run_compiled = jax.jit(_run, static_argnames=ReverseSweep._fields)
reverse_sweep_p.def_impl(_run_compiled)
mlir.register_lowering(reverse_sweep_p, mlir.lower_fun(_run, multiple_results=True))
