"""Which way a batch whose lanes take different numbers of steps is expected to be fastest: `lanes="auto"`.

The numbers of steps are not known where the batch is written. Without a hint, they are taken to be distributed as
exponentials are: then it takes `log(n / m)` mean numbers of steps until m of n lanes are left. What decides is what a
step of one lane costs alone, and what it adds to a step of the batch (`core/jaxpr/cost.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from loopax._src.core.ir.lanes import (
    CPU_LANES,
    AutoLanes,
    Compact,
    Lanes,
    Lockstep,
    Sequential,
    fewest_lanes,
    group_sizes,
    stages,
)
from loopax._src.core.jaxpr.cost import StepCost, step_cost
from loopax._src.core.jaxpr.dependence import mixing_primitive
from loopax._src.jax_internals import ClosedJaxpr
from loopax._src.settings import calibration

LAST_LANE = 0.58  # the limit of 1 + 1/2 + ... + 1/n - log(n): mean numbers of steps that the last lane takes alone
_FORWARD_AND_BACK = 3  # times of a step forward


# The parts of a loop: the known one, the linear one, and its sweep. They run alike, since a sweep starts from what the
# loop has saved, and draws what it has drawn. What each evaluates would not tell: some of the body, or other things.


_UNKNOWN = StepCost(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Priced(AutoLanes):
    """`AutoLanes` of the parts of a loop."""

    cost: StepCost = _UNKNOWN  # of the body of the loop
    adds: int = 0  # the bytes of what each step of a lane adds cotangents to


@dataclass(frozen=True)
class Together(Lockstep):
    """Of the parts of a loop no lane of which may leave a batch."""

    mixed_by: str  # as `kept_together` says


@dataclass(frozen=True, repr=False)
class OneStage(Compact):
    """All lanes together; where a gradient is taken, they walk again in groups."""

    def __repr__(self) -> str:
        """Return both."""
        return f"{Lockstep()!r}, and {Compact()!r} in a gradient"


@dataclass(frozen=True)
class IfGathered(Lockstep):
    """Of a loop of one step or none: in batches of lanes that take the step, where that is expected to be faster."""


def gathered(how: Lanes, body: ClosedJaxpr, num_consts: int, moved: Sequence[Any], lanes: Any) -> Lanes:
    """How so many lanes of a loop of one step or none run; `moved`: the types of what each has of its own."""
    if not isinstance(how, IfGathered):
        return how
    fewest = fewest_lanes(Compact(), CPU_LANES)
    if not isinstance(lanes, int) or lanes < 2 * fewest or kept_together(Compact(), body):
        return Lockstep()
    # Half of what a group has: what is left over in the last batch is computed in vain, in each step.
    return Compact(min_lanes=fewest // 2) if step_cost(body, num_consts).gathers(moved, lanes) else Lockstep()


def of_parts(how: Lanes, body: ClosedJaxpr, num_consts: int) -> Lanes:
    """The lanes of the parts of a loop with this body."""
    if mixing := kept_together(how, body):
        return Together(mixing)
    if isinstance(how, AutoLanes) and not isinstance(how, Priced):
        return Priced(how.counts, step_cost(body, num_consts))
    return how


def of_transposed(how: Lanes, num_bytes: int) -> Lanes:
    """The lanes of a loop whose steps add cotangents to so many bytes."""
    return Priced(how.counts, how.cost, num_bytes) if isinstance(how, Priced) else how


def of_uniform(how: Lanes, lanes: Any) -> Lanes:
    """The lanes of a loop that does at once what so many loops did, all of which take the same steps."""
    if not isinstance(how, Priced) or not isinstance(lanes, int):
        return how
    of_lane, of_batch, alone, widest = how.cost
    return Priced(how.counts, StepCost(lanes * of_lane, of_batch, lanes * alone, lanes * widest), how.adds)


def chosen(how: Lanes, body: ClosedJaxpr, num_consts: int, lanes: Any, walks_again: bool = False) -> Lanes:
    """How a batch of so many lanes runs; what is no choice is as it is, unless its lanes must stay together.

    `walks_again`: whether a gradient of it may walk forward again.
    """
    if kept_together(how, body):
        return Lockstep()
    if not isinstance(how, AutoLanes):
        return how
    if not isinstance(lanes, int) or lanes < 2:
        return Lockstep()
    expected = estimates(how, body, num_consts, lanes)
    fastest = min(expected, key=lambda lanes: expected[lanes])
    return OneStage() if walks_again and fastest == Lockstep() and _groups_pay(how, lanes) else fastest


def _groups_pay(how: AutoLanes, lanes: int) -> bool:
    """Whether groups of a batch are expected to take less than half of the steps of lanes that wait for each other."""
    walked = start = 0
    for number, size in group_sizes(Compact(), lanes):
        for _ in range(number):
            walked += size * _time_until(min(start, lanes - 1), lanes, how.counts)
            start += size
    return walked < lanes * _time_until(0, lanes, how.counts) / 2


def estimates(how: AutoLanes, body: ClosedJaxpr, num_consts: int, lanes: int) -> dict[Lanes, float]:
    """The nanoseconds of a lane for each of its own steps, in each way that comes into question.

    Stages of a step that costs little take longer than it. They count as what a lane alone has to beat.
    """
    cost, adds = (how.cost, how.adds) if isinstance(how, Priced) else (step_cost(body, num_consts), 0)
    sizes = [stage.places for stage in stages(Compact(), lanes, cost.shrink)]
    until = [_time_until(left, lanes, how.counts) for left in [*sizes[1:], 0]]
    durations = [end - start for start, end in zip([0.0, *until], until, strict=False)]
    lane_steps = sum(size * duration for size, duration in zip(sizes, durations, strict=True))
    together, in_group = cost.of_lane + _adding(adds, lanes), max(size for _, size in group_sizes(Compact(), lanes))
    in_stages = (lane_steps * (cost.of_lane + _adding(adds, in_group)) + until[-1] * cost.of_batch) / lanes
    found: dict[Lanes, float] = {Lockstep(): until[-1] * (together + cost.of_batch / lanes)}
    if len(sizes) > 1 and not cost.is_cheap:
        found[Compact()] = in_stages
    alone_is_fast = calibration().platform == "cpu"  # one lane keeps a core busy
    is_spread = not cost.of_batch and lanes > cost.most_on_one_core
    alone = cost.alone + _adding(adds, 1)
    if alone_is_fast and not is_spread and alone < in_stages:
        found[Sequential()] = alone
    return found


def _adding(num_bytes: int, lanes: int) -> float:
    """Adding to so many bytes of each of these lanes, beside a step forward. It is a part of a step back and forth."""
    return calibration().storing(num_bytes, lanes * num_bytes) / _FORWARD_AND_BACK


def _time_until(left: int, lanes: int, counts: Sequence[float] | None) -> float:
    """The mean numbers of steps until so many of the lanes are left."""
    if counts is None:
        return log(lanes / left) if left else log(lanes) + LAST_LANE
    mean = sum(counts) / len(counts)
    return counts[min(left * len(counts) // lanes, len(counts) - 1)] / mean if mean else 1.0


def kept_together(how: Lanes, body: ClosedJaxpr) -> str:
    """The primitive for which no lane may leave a batch: other lanes see it. Empty if lanes may leave, or never do."""
    if isinstance(how, Together):
        return how.mixed_by
    return mixing_primitive(body) or "" if isinstance(how, Compact | AutoLanes) else ""
