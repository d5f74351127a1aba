"""Which way a batch whose lanes take different numbers of steps is expected to be fastest: `lanes="auto"`.

The numbers of steps are not known where the batch is written, and are taken to be distributed as exponentials are. Then
it takes `log(n / m)` mean numbers of steps until m of n lanes are left. What decides is what a step of one lane costs
alone, and what it adds to a step of the batch (`core/jaxpr/cost.py`).
"""

from dataclasses import dataclass
from math import log
from typing import Any

import jax

from loopax._src.core.ir.lanes import AutoLanes, Compact, Lanes, Lockstep, Sequential, stages
from loopax._src.core.jaxpr.cost import StepCost, step_cost
from loopax._src.core.jaxpr.dependence import mixing_primitive
from loopax._src.jax_internals import ClosedJaxpr

LAST_LANE = 0.58  # the limit of 1 + 1/2 + ... + 1/n - log(n): mean numbers of steps that the last lane takes alone


# The parts of a loop: the known one, the linear one, and its sweep. They run alike, since a sweep starts from what the
# loop has saved, and draws what it has drawn. What each evaluates would not tell: some of the body, or other things.


@dataclass(frozen=True)
class Priced(AutoLanes):
    """`AutoLanes` of the parts of a loop."""

    cost: StepCost  # of the body of the loop


@dataclass(frozen=True)
class Together(Lockstep):
    """Of the parts of a loop no lane of which may leave a batch."""

    mixed_by: str  # as `kept_together` says


def of_parts(how: Lanes, body: ClosedJaxpr, num_consts: int) -> Lanes:
    """The lanes of the parts of a loop with this body."""
    if mixing := kept_together(how, body):
        return Together(mixing)
    is_open = isinstance(how, AutoLanes) and not isinstance(how, Priced)
    return Priced(step_cost(body, num_consts)) if is_open else how


def of_uniform(how: Lanes, lanes: Any) -> Lanes:
    """The lanes of a loop that does at once what so many loops did, all of which take the same steps."""
    if not isinstance(how, Priced) or not isinstance(lanes, int):
        return how
    of_lane, of_batch, alone, widest = how.cost
    return Priced(StepCost(lanes * of_lane, of_batch, lanes * alone, lanes * widest))


def chosen(how: Lanes, body: ClosedJaxpr, num_consts: int, lanes: Any) -> Lanes:
    """How a batch of so many lanes runs; what is no choice is as it is, unless its lanes must stay together."""
    if kept_together(how, body):
        return Lockstep()
    if not isinstance(how, AutoLanes):
        return how
    if not isinstance(lanes, int) or lanes < 2:
        return Lockstep()
    cost = how.cost if isinstance(how, Priced) else step_cost(body, num_consts)
    sizes = [stage.places for stage in stages(Compact(), lanes, cost.shrink)]
    # What a step of a lane costs in stages of these sizes, for each of its own steps.
    durations = [log(size / smaller) for size, smaller in zip(sizes, [*sizes[1:], 1], strict=True)]
    durations[-1] += LAST_LANE
    lane_steps = sum(size * duration for size, duration in zip(sizes, durations, strict=True))
    in_batch = (lane_steps * cost.of_lane + sum(durations) * cost.of_batch) / sizes[0]
    alone_is_fast = jax.default_backend() == "cpu"  # one lane keeps a core busy
    is_spread = not cost.of_batch and lanes > cost.most_on_one_core
    if alone_is_fast and not is_spread and cost.alone < in_batch:
        return Sequential()
    return Compact() if len(sizes) > 1 and not cost.is_cheap else Lockstep()


def kept_together(how: Lanes, body: ClosedJaxpr) -> str:
    """The primitive for which no lane may leave a batch: other lanes see it. Empty if lanes may leave, or never do."""
    if isinstance(how, Together):
        return how.mixed_by
    return mixing_primitive(body) or "" if isinstance(how, Compact | AutoLanes) else ""
