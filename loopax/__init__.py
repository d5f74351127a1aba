"""Loops for JAX whose number of steps is known only at run time, closed under every transformation."""

from loopax._types import LoopInfo
from loopax.kinds import Auto, Bounded, Checkpointed, Kind, Lax, Residuals
from loopax.lanes import Compact, Free, Lanes, Lockstep
from loopax.loops import fori_loop, scan, while_loop

__all__ = [
    "Auto",
    "Bounded",
    "Checkpointed",
    "Compact",
    "Free",
    "Kind",
    "Lanes",
    "Lax",
    "Lockstep",
    "LoopInfo",
    "Residuals",
    "fori_loop",
    "scan",
    "while_loop",
]

__version__ = "0.1.0"
