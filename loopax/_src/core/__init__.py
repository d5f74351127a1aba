"""The primitives of loopax and their rules. Importing this package registers the rules with JAX (`rules.py`).

May import: core/autodiff, core/batching, core/buffer_versions, core/ir, core/jaxpr, core/lane_effects, core/lowering,
core/nested_lanes, core/own_arrays, core/queue, jax_internals.
"""

from loopax._src.core import rules
from loopax._src.core.batching.groups import run_function
from loopax._src.core.buffer_versions import run_with_tape
from loopax._src.core.ir.annotations import UNNAMED, DebugInfo, Names, Reporting
from loopax._src.core.ir.kind import (
    Cost,
    Decided,
    Derivative,
    Kind,
    LoopCall,
    LoopFacts,
    LoopOperands,
    checked_kind,
    kept,
    run_by,
)
from loopax._src.core.ir.loop import BoundLoop, Loop, LoopInputs, Outcome, run
from loopax._src.core.ir.plan import (
    DEFAULT_SLOTS,
    Blocks,
    BlocksThenResiduals,
    Checkpoints,
    EveryCarry,
    EveryResidual,
    LastCarry,
    NoReverseMode,
    Plan,
    WalkBack,
)
from loopax._src.core.jaxpr.dependence import mixing_primitive
from loopax._src.core.nested_lanes import run_free
from loopax._src.core.queue import NO_ITEM, ItemRows, queue_for, run_chunk, run_queue
