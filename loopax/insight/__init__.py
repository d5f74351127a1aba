"""What the loops of a program store and cost: `explain` finds it from the trace, `compare` measures it."""

from loopax._src.insight.advice import Advice, Stored
from loopax._src.insight.compare import Comparison, Measured
from loopax._src.insight.explain import Leaf, LoopExplanation

__all__ = ["Advice", "Comparison", "Leaf", "LoopExplanation", "Measured", "Stored"]
