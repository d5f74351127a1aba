"""What a kind of your own (a subclass of `loopax.Kind`) learns about a loop, and which plans it may return."""

from loopax._src.core.ir.kind import Cost, LoopCall, LoopFacts, LoopOperands, StepFacts
from loopax._src.core.ir.loop import Outcome
from loopax._src.core.ir.plan import Checkpoints, EveryCarry, EveryResidual, LastCarry, NoReverseMode, Plan

__all__ = [
    "Checkpoints",
    "Cost",
    "EveryCarry",
    "EveryResidual",
    "LastCarry",
    "LoopCall",
    "LoopFacts",
    "LoopOperands",
    "NoReverseMode",
    "Outcome",
    "Plan",
    "StepFacts",
]
