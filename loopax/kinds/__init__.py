"""What a kind of your own is made of: the class to derive from, what it is told of a loop, and what it may answer."""

from loopax._src.core.ir.kind import Cost, Kind, LoopFacts, StepFacts
from loopax._src.core.ir.plan import Checkpoints, EveryCarry, EveryResidual, NoReverseMode, Plan

__all__ = [
    "Checkpoints",
    "Cost",
    "EveryCarry",
    "EveryResidual",
    "Kind",
    "LoopFacts",
    "NoReverseMode",
    "Plan",
    "StepFacts",
]
