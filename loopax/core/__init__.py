"""The loop primitive and its rules. Importing this package registers the rules with JAX."""

from loopax.core import (
    batching,
    jvp,
    linearize,
    lowering,
    remat,
    replay_batching,
    replay_jvp,
    replay_linearize,
)
from loopax.core.loop import Loop, Outcome, run
from loopax.core.storage import Blocks, EveryCarry, EveryResidual, Nothing, Storage

__all__ = [
    "Blocks",
    "EveryCarry",
    "EveryResidual",
    "Loop",
    "Nothing",
    "Outcome",
    "Storage",
    "batching",
    "jvp",
    "linearize",
    "lowering",
    "remat",
    "replay_batching",
    "replay_jvp",
    "replay_linearize",
    "run",
]
