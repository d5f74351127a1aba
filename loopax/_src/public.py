"""All that is public: what `loopax` imports when the first name of it is used."""

# ruff: noqa: PLC0414 - to type checkers, names with an alias are public

from loopax import durable as durable
from loopax import stochtrace as stochtrace
from loopax._src.branches import cond as cond
from loopax._src.branches import switch as switch
from loopax._src.buffers import Buffer as Buffer
from loopax._src.configuration import configure as configure
from loopax._src.core.ir.lanes import AutoLanes as AutoLanes
from loopax._src.core.ir.lanes import Compact as Compact
from loopax._src.core.ir.lanes import Free as Free
from loopax._src.core.ir.lanes import Lanes as Lanes
from loopax._src.core.ir.lanes import Lockstep as Lockstep
from loopax._src.core.ir.lanes import Sequential as Sequential
from loopax._src.history import History as History
from loopax._src.insight.compare import compare as compare
from loopax._src.insight.comparison import Comparison as Comparison
from loopax._src.insight.explain import Explanation as Explanation
from loopax._src.insight.explain import explain as explain
from loopax._src.insight.lane_report import LaneReport as LaneReport
from loopax._src.insight.lane_report import lane_report as lane_report
from loopax._src.kinds import Auto as Auto
from loopax._src.kinds import Bounded as Bounded
from loopax._src.kinds import Checkpointed as Checkpointed
from loopax._src.kinds import Derivative as Derivative
from loopax._src.kinds import Implicit as Implicit
from loopax._src.kinds import Kind as Kind
from loopax._src.kinds import Lax as Lax
from loopax._src.kinds import Residuals as Residuals
from loopax._src.kinds import Reversible as Reversible
from loopax._src.kinds import Truncated as Truncated
from loopax._src.loops import fori_loop as fori_loop
from loopax._src.loops import scan as scan
from loopax._src.loops import while_loop as while_loop
from loopax._src.nnx.functional import local as local
from loopax._src.progress import Progress as Progress
from loopax._src.pytrees.leaves import LoopInfo as LoopInfo
from loopax._src.queues.lanes_map import lanes_map as lanes_map
from loopax._src.queues.lanes_stream import LanesStream as LanesStream
from loopax._src.queues.lanes_stream import SuspendedStream as SuspendedStream
from loopax._src.queues.lanes_stream import lanes_stream as lanes_stream
from loopax._src.queues.working_lanes import StreamReport as StreamReport
from loopax._src.rewrite.rewrite_loops import rewrite_loops as rewrite_loops
from loopax._src.rollout import Rollout as Rollout
from loopax._src.rollout import rollout as rollout
from loopax._src.sharding.sharded_lanes import sharded_lanes as sharded_lanes
