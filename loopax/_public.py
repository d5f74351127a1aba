"""All that is public: what `loopax` imports when the first name of it is used."""

# ruff: noqa: PLC0414 - to type checkers, names with an alias are public

from loopax import durable as durable
from loopax import stochtrace as stochtrace
from loopax._rollout import Rollout as Rollout
from loopax._rollout import rollout as rollout
from loopax._types import LoopInfo as LoopInfo
from loopax.buffers import Buffer as Buffer
from loopax.history import History as History
from loopax.insight.compare import compare as compare
from loopax.insight.comparison import Comparison as Comparison
from loopax.insight.explain import Explanation as Explanation
from loopax.insight.explain import explain as explain
from loopax.kinds import Auto as Auto
from loopax.kinds import Bounded as Bounded
from loopax.kinds import Checkpointed as Checkpointed
from loopax.kinds import Kind as Kind
from loopax.kinds import Lax as Lax
from loopax.kinds import Residuals as Residuals
from loopax.lanes import Compact as Compact
from loopax.lanes import Free as Free
from loopax.lanes import Lanes as Lanes
from loopax.lanes import Lockstep as Lockstep
from loopax.loops import fori_loop as fori_loop
from loopax.loops import scan as scan
from loopax.loops import while_loop as while_loop
from loopax.mapping import lanes_map as lanes_map
from loopax.models import local as local
from loopax.progress import Progress as Progress
from loopax.report import LaneReport as LaneReport
from loopax.report import lane_report as lane_report
from loopax.rewrite import rewrite_loops as rewrite_loops
from loopax.sharding import sharded_lanes as sharded_lanes
