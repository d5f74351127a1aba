"""The primitives of loopax and their rules. Importing this package registers the rules with JAX.

May import: core/autodiff, core/batching, core/ir, core/lowering, core/programs.
"""

from loopax._src.core.autodiff import jvp, partial_eval_rule, remat_dce, sweep_jvp, sweep_partial_eval
from loopax._src.core.batching import loop as batching_of_loops
from loopax._src.core.batching import sweep as batching_of_sweeps
from loopax._src.core.batching.compact import autodiff as derivatives_of_batches
from loopax._src.core.ir.debug_info import UNNAMED, DebugInfo, Names
from loopax._src.core.ir.kind import Checkpoints, EveryCarry, EveryResidual, Fastest, Nothing, Storage
from loopax._src.core.ir.loop import Loop, Outcome, run
from loopax._src.core.ir.progress import Reporting
from loopax._src.core.lowering import loop as lowering_of_loops
from loopax._src.core.lowering import sweep as lowering_of_sweeps
from loopax._src.core.programs.nested_lanes import run_free
from loopax._src.core.programs.work_queue import run_queue

__all__ = [
    "UNNAMED",
    "Checkpoints",
    "DebugInfo",
    "EveryCarry",
    "EveryResidual",
    "Fastest",
    "Loop",
    "Names",
    "Nothing",
    "Outcome",
    "Reporting",
    "Storage",
    "batching_of_loops",
    "batching_of_sweeps",
    "derivatives_of_batches",
    "jvp",
    "lowering_of_loops",
    "lowering_of_sweeps",
    "partial_eval_rule",
    "remat_dce",
    "run",
    "run_free",
    "run_queue",
    "sweep_jvp",
    "sweep_partial_eval",
]
