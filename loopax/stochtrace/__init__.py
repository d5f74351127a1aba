"""Stochastic trace estimation. The number of matrix-vector products may be decided at run time."""

from loopax._src.stochtrace.estimate import estimate_trace
from loopax._src.stochtrace.estimator import Estimator, TraceEstimate
from loopax._src.stochtrace.hutchinson import Hutchinson
from loopax._src.stochtrace.sketch import HutchPlusPlus
from loopax._src.stochtrace.xtrace import XNysTrace, XTrace

__all__ = ["Estimator", "HutchPlusPlus", "Hutchinson", "TraceEstimate", "XNysTrace", "XTrace", "estimate_trace"]
