"""Loops for JAX whose number of steps is known only at run time, closed under every transformation."""

from loopax import durable as durable
from loopax import stochtrace as stochtrace
from loopax._types import LoopInfo
from loopax._version import __version__ as __version__
from loopax.buffers import Buffer
from loopax.history import History
from loopax.insight.compare import compare
from loopax.insight.comparison import Comparison
from loopax.insight.explain import Explanation, explain
from loopax.kinds import Auto, Bounded, Checkpointed, Kind, Lax, Residuals
from loopax.lanes import Compact, Free, Lanes, Lockstep
from loopax.loops import fori_loop, scan, while_loop
from loopax.mapping import lanes_map
from loopax.models import local
from loopax.progress import Progress
from loopax.report import LaneReport, lane_report
from loopax.rewrite import rewrite_loops
from loopax.rollout import Rollout, rollout
from loopax.sharding import sharded_lanes

__all__ = [
    "Auto",
    "Bounded",
    "Buffer",
    "Checkpointed",
    "Compact",
    "Comparison",
    "Explanation",
    "Free",
    "History",
    "Kind",
    "LaneReport",
    "Lanes",
    "Lax",
    "Lockstep",
    "LoopInfo",
    "Progress",
    "Residuals",
    "Rollout",
    "compare",
    "explain",
    "fori_loop",
    "lane_report",
    "lanes_map",
    "local",
    "rewrite_loops",
    "rollout",
    "scan",
    "sharded_lanes",
    "while_loop",
]
