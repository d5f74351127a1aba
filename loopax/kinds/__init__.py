"""What a kind of your own (a subclass of `loopax.Kind`) is told of a loop, and what it may answer."""

from loopax._src.core.ir.kind import Cost, LoopFacts, StepFacts
from loopax._src.core.ir.plan import Checkpoints, EveryCarry, EveryResidual, LastCarry, NoReverseMode, Plan

__all__ = [
    "Checkpoints",
    "Cost",
    "EveryCarry",
    "EveryResidual",
    "LastCarry",
    "LoopFacts",
    "NoReverseMode",
    "Plan",
    "StepFacts",
]
