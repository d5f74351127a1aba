"""What a kind or a derivative of your own (`loopax.Kind`, `loopax.Derivative`) learns of a loop, and plans."""

from loopax._src.core.ir.kind import Cost, LoopCall, LoopFacts, LoopOperands, ResidualFacts, StepFacts
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
    "ResidualFacts",
    "StepFacts",
]
