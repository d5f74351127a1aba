"""Stochastic trace estimation, with as many matrix-vector products as are decided at run time."""

from loopax.stochtrace.estimate import TraceEstimate, estimate_trace
from loopax.stochtrace.estimator import Estimator
from loopax.stochtrace.hutchinson import Hutchinson
from loopax.stochtrace.hutchpp import HutchPlusPlus
from loopax.stochtrace.xnystrace import XNysTrace
from loopax.stochtrace.xtrace import XTrace

__all__ = [
    "Estimator",
    "HutchPlusPlus",
    "Hutchinson",
    "TraceEstimate",
    "XNysTrace",
    "XTrace",
    "estimate_trace",
]
