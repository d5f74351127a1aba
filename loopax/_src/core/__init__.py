"""The primitives of loopax and their rules. Importing this package registers the rules with JAX (`rules.py`).

May import: core/autodiff, core/batching, core/effects, core/ir, core/jaxpr, core/lowering, core/programs,
core/row_buffers, jax_internals.
"""

from loopax._src.core import rules
from loopax._src.core.ir.call import LoopCall, LoopOperands
from loopax._src.core.ir.debug_info import UNNAMED, DebugInfo, Names
from loopax._src.core.ir.facts import Cost, LoopFacts, StepFacts
from loopax._src.core.ir.kind import Asked, Derivative, Kind, run_by, runs_plainly
from loopax._src.core.ir.loop import BoundLoop, Loop, LoopInputs, Outcome, run
from loopax._src.core.ir.plan import Checkpoints, EveryCarry, EveryResidual, LastCarry, NoReverseMode, Plan, Storage
from loopax._src.core.ir.progress import Reporting
from loopax._src.core.jaxpr.mixed_lanes import mixing_primitive
from loopax._src.core.programs.nested_lanes import run_free
from loopax._src.core.programs.queue_chunks import ItemRows, queue_for, run_chunk
from loopax._src.core.programs.work_queue import NO_ITEM, run_queue
from loopax._src.core.row_buffers.tape import run_with_tape

__all__ = [
    "NO_ITEM",
    "UNNAMED",
    "Asked",
    "BoundLoop",
    "Checkpoints",
    "Cost",
    "DebugInfo",
    "Derivative",
    "EveryCarry",
    "EveryResidual",
    "ItemRows",
    "Kind",
    "LastCarry",
    "Loop",
    "LoopCall",
    "LoopFacts",
    "LoopInputs",
    "LoopOperands",
    "Names",
    "NoReverseMode",
    "Outcome",
    "Plan",
    "Reporting",
    "StepFacts",
    "Storage",
    "mixing_primitive",
    "queue_for",
    "rules",
    "run",
    "run_by",
    "run_chunk",
    "run_free",
    "run_queue",
    "run_with_tape",
    "runs_plainly",
]
