"""How a reverse sweep is compiled."""

from typing import Any

import jax

from loopax._compat import mlir, zeros
from loopax.core.block_sweep import sweep_blocks
from loopax.core.devices import unvarying
from loopax.core.jaxprs import split, stacked
from loopax.core.replay import Replay, replay_p
from loopax.core.slot_sweep import sweep_slots
from loopax.core.sweep import Track, bodies_of
from loopax.core.walk import State
from loopax.schedule import Blocks


def _run(low: Any, high: Any, marks: Any, *operands: Any, **params: Any) -> list[Any]:
    static = Replay(**params)
    low, high, marks = map(unvarying, (low, high, marks))
    consts, _, saved, carry, xs = split(operands, static.sizes)
    ys = [zeros(stacked(aval, static.bound or 0)) for aval in static.y_avals]
    if static.bound == 0:  # there are no rows, and no marks
        return [*carry, *ys]
    track = Track.of(static, low, high, marks)
    bodies, progress = bodies_of(static, consts, xs), State(carry, ys, low)
    if isinstance(static.saving, Blocks):
        progress = sweep_blocks(static, track, bodies, static.saving.size, saved, progress)
    else:
        progress = sweep_slots(track, bodies, marks, saved, progress)
    return [*progress.carry, *progress.ys]


_run_compiled = jax.jit(_run, static_argnames=Replay._fields)
replay_p.def_impl(_run_compiled)
mlir.register_lowering(replay_p, mlir.lower_fun(_run, multiple_results=True))
