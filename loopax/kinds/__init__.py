"""What a kind of your own (a subclass of `loopax.Kind`) learns about a loop, and which plans it may return."""

from loopax._src.core.ir.call import LoopCall, LoopOperands
from loopax._src.core.ir.facts import Cost, LoopFacts, StepFacts
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
