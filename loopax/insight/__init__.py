"""What the loops of a program store and cost: `explain` says it from the trace, `compare` measures it."""

from loopax.insight.advice import Advice
from loopax.insight.comparison import Comparison, Measured
from loopax.insight.explanation import Leaf, LoopExplanation
from loopax.insight.storing import Stored

__all__ = ["Advice", "Comparison", "Leaf", "LoopExplanation", "Measured", "Stored"]
