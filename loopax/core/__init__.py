"""The loop primitive and its rules. Importing this package registers the rules with JAX."""

from loopax.core import (
    batching,
    compact_linearize,
    jvp,
    linearize,
    lowering,
    remat,
    replay_batching,
    replay_jvp,
    replay_linearize,
    replay_lowering,
)
from loopax.core.free import run_free
from loopax.core.loop import Loop, Outcome, run
from loopax.core.origin import UNNAMED, Names, Origin
from loopax.core.queue import run_queue
from loopax.core.reporting import Reporting
from loopax.core.storage import Checkpoints, EveryCarry, EveryResidual, Fastest, Nothing, Storage

__all__ = [
    "UNNAMED",
    "Checkpoints",
    "EveryCarry",
    "EveryResidual",
    "Fastest",
    "Loop",
    "Names",
    "Nothing",
    "Origin",
    "Outcome",
    "Reporting",
    "Storage",
    "batching",
    "compact_linearize",
    "jvp",
    "linearize",
    "lowering",
    "remat",
    "replay_batching",
    "replay_jvp",
    "replay_linearize",
    "replay_lowering",
    "run",
    "run_free",
    "run_queue",
]
