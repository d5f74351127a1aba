"""Which way a batch whose lanes take different numbers of steps is expected to be fastest: `lanes="auto"`.

The numbers of steps are not known where the batch is written, and are taken to be distributed as exponentials are. Then
it takes `log(n / m)` mean numbers of steps until m of n lanes are left. What decides is what a step of one lane costs
alone, and what it adds to a step of the batch (`core/jaxpr/cost.py`).
"""

from collections.abc import Sequence
from math import log
from typing import Any

from loopax._src.core.ir.lane_stages import Choice, HowLanesRun, OneByOne, Stages
from loopax._src.core.jaxpr.cost import StepCost, step_cost
from loopax._src.core.jaxpr.mixed_lanes import mixing_primitive
from loopax._src.jax_internals import ClosedJaxpr

LAST_LANE = 0.58  # the limit of 1 + 1/2 + ... + 1/n - log(n): mean numbers of steps that the last lane takes alone


def chosen(how: HowLanesRun, body: ClosedJaxpr, num_consts: int, lanes: Any) -> HowLanesRun:
    """How a batch of so many lanes runs; what is no choice is as it is, unless its lanes must stay together."""
    if kept_together(how, body):
        return None
    if not isinstance(how, Choice):
        return how
    if not isinstance(lanes, int) or lanes < 2:
        return None
    cost = step_cost(body, num_consts)
    sizes = how.stages.sizes(lanes, cost.is_cheap)
    if how.alone_is_fast and not cost.is_spread(lanes) and cost.alone < _in_batch(cost, sizes):
        return OneByOne()
    return how.stages if len(sizes) > 1 and not cost.is_cheap else None


def kept_together(how: HowLanesRun, body: ClosedJaxpr) -> str:
    """The primitive for which no lane may leave a batch: other lanes see it. Empty if lanes may leave, or never do."""
    return mixing_primitive(body) or "" if isinstance(how, Stages | Choice) else ""


def _in_batch(cost: StepCost, sizes: Sequence[int]) -> float:
    """What a step of a lane costs in stages of these sizes, for each of its own steps."""
    durations = [log(size / smaller) for size, smaller in zip(sizes, [*sizes[1:], 1], strict=True)]
    durations[-1] += LAST_LANE
    lane_steps = sum(size * duration for size, duration in zip(sizes, durations, strict=True))
    return (lane_steps * cost.of_lane + sum(durations) * cost.of_batch) / sizes[0]
