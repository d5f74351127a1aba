"""`Auto`: the fastest of the other kinds that fits in so much memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

from loopax._src.core import DEFAULT_SLOTS, Checkpoints, Cost, Kind, LoopFacts, Plan
from loopax._src.jax_internals import api_boundary
from loopax._src.kinds.storing import Bounded, Checkpointed, Residuals
from loopax._src.pytrees.static import Why, code_of_call, positive_int
from loopax._src.settings import settings

MEMORY = Why(
    "what a gradient stores", "give the most bytes that a gradient may take: one budget serves every number of steps"
)

LANES = Why("how much memory each lane may use", "choose one for all calls: results do not depend on it")
_NEAR = 1.05  # times that differ by less are taken for equal
_NEGLIGIBLE, _MANY = 10_000, 1024  # nanoseconds in all steps of one lane; lanes
# Lanes that there may be where a bound is loose: rows are set to zero up to the bound, for each of them. And what is
# lost at most, for their sake, where there is one lane.
_SOME, _LOST = 64, 1.25


@api_boundary
@dataclass(frozen=True)
class Auto(Kind):
    """Choose the fastest kind that fits in a memory budget (the default kind).

    `Auto` makes its choice where a gradient is traced, from:

    - the bound on the number of steps,
    - the types in the carry, and what the derivative of a step needs,
    - an estimate of the time of a step.

    With a bound, `Auto` takes `Residuals()`, `Bounded()` or `Checkpointed()`; the last with as many checkpoints as fit.
    Without a bound, `Auto` takes `Checkpointed()` with up to 64 checkpoints. A loop that is never differentiated runs
    as with `Lax()`. `explain` shows the choice and its reason.

    Parameters
    ----------
    memory
        The bytes that the gradient of one loop may store. None: those of `loopax.configure`, which are 256 MiB on every
        device if nothing is said.
    num_lanes
        The number of lanes of a `jax.vmap` outside of the gradient, which share `memory`. None: it is not known, and
        each lane may store `memory` bytes.

    Raises
    ------
    TypeError
        `memory` or `num_lanes` is not an int, or is traced.
    ValueError
        `memory` or `num_lanes` is less than 1. Or, where a gradient is taken, `memory` is smaller than one carry of
        each lane; the message gives the size of the carry.

    Notes
    -----
    If the bound is `max_steps` and the length is known only at run time, the loop may take far fewer steps than the
    bound. `Residuals()` and `Bounded()` need room for all steps of the bound, so they then get an eighth of `memory`.

    `jax.grad(jax.vmap(f))`: the gradient sees all lanes, and `Auto` chooses for them. `jax.vmap(jax.grad(f))`: the
    gradient sees one lane, and the map multiplies what is stored. `Auto` then chooses

    - for `num_lanes` lanes if you give their number;
    - for 64 lanes if the loop says how lanes run (`lanes="compact"` or others), one after another with
      `lanes="sequential"`;
    - else for one lane. If kinds differ by at most 10 microseconds there, in all steps, `Auto` chooses among these for
      1024 lanes. If the loop may take far fewer steps than the bound, `Auto` takes the kind that loses least beside
      the fastest one, in one lane (at most a quarter) and in 64: all rows up to the bound are set to zero, which takes
      longest in a batch.

    Of kinds whose estimated times differ by less than 5 %, `Auto` takes the one that stores less.

    """

    memory: int | None = None
    num_lanes: int | None = None
    _chooses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.memory is not None:
            object.__setattr__(self, "memory", positive_int("Auto(memory=...)", self.memory, "bytes", MEMORY))
        if self.num_lanes is not None:
            object.__setattr__(self, "num_lanes", positive_int("Auto(num_lanes=...)", self.num_lanes, "lanes", LANES))

    def __repr__(self) -> str:
        """Return the code that makes this object."""
        return code_of_call("Auto", memory=self.memory, num_lanes=self.num_lanes)

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`."""
        if not loop.sizes_are_known:
            return Checkpoints(reason="sizes are not known when the loop is traced")
        costs, budget = self._candidates(loop), self._budget(loop)
        if loop.bound is None:
            ((checkpointed, cost),) = costs.items()
            return checkpointed.plan(loop).because(f"no static bound: {cost.stored}, of at most {budget} bytes")
        times = {kind: cost.time for kind, cost in costs.items()}
        of_many, of_some = ({}, {}) if self._knows_lanes(loop) else _times_of_batches(loop, loop.bound, times)
        alone = smallest_of_fastest(of_many or times, costs)
        best = smallest_of_fastest(_losses(times, of_some), costs) if of_some else alone
        lanes = f" of each of {self._lanes(loop)} lanes" if self._lanes(loop) > 1 else ""
        reason = f"at most {budget} bytes for {loop.bound} steps{lanes}; expected nanoseconds for a step"
        reason += f"{' of all' if lanes else ''}: {_listed(times)}"
        if of_many:
            reason += f", which is much the same in all; of {_MANY} lanes: {_listed(of_many)}"
        if best != alone:
            reason += f"; in a batch of {_SOME}, if it is one: {_listed(of_some)}"
        return best.plan(loop).because(", ".join(filter(None, [costs[best].stored, reason])))

    def _for_lanes(self, lanes: int) -> Kind:
        return replace(self, num_lanes=lanes)

    def _lanes(self, loop: LoopFacts) -> int:
        """The lanes outside of the gradient for which the choice is made."""
        return self.num_lanes or loop.lanes_to_come

    def _knows_lanes(self, loop: LoopFacts) -> bool:
        """Whether somebody has said how many lanes there are outside, or they are inside of the gradient already."""
        says = self.num_lanes is not None or loop.lanes_to_come > 1 or loop.lanes_apart > 1 or loop.share < 1
        return says or loop.is_batch

    def _candidates(self, loop: LoopFacts) -> dict[Kind, Cost]:
        """The kinds that fit in the memory, and what they cost: bytes of one lane, and the time of all."""
        budget = self._budget(loop)
        if loop.step.carry_bytes > budget:
            least = ceil(loop.step.carry_bytes * (self.num_lanes or 1) / loop.share)
            raise ValueError(
                f"Auto(memory={self.memory}): the gradient of this loop stores at least one carry, which has {least} "
                f"bytes (what the derivative needs of it). Give memory={least} or more; for n steps, about 2 sqrt(n) "
                "times as much makes it three to four times as fast."
            )
        if loop.bound is None:
            kind = Checkpointed(DEFAULT_SLOTS)._within(budget, loop)
            return {kind: kind.cost(loop)}
        of_all = replace(loop, lanes=self._lanes(loop))
        costs = {kind: kind.cost(of_all) for kind in _kinds(loop, loop.bound, budget)}
        return {kind: cost for kind, cost in costs.items() if cost and cost.memory <= budget}

    def _budget(self, loop: LoopFacts) -> int:
        memory = settings().memory if self.memory is None else self.memory
        return int(memory * loop.share / (self.num_lanes or 1))


def _times_of_batches(loop: LoopFacts, bound: int, times: Mapping[Kind, float]) -> tuple[dict[Kind, float], ...]:
    """Those in a batch of many lanes, if the choice matters there alone; else of some, if the bound is loose."""
    fastest = min(times.values())
    near = [kind for kind, time in times.items() if (time - fastest) * bound <= _NEGLIGIBLE]
    of_many = _times_of(near, replace(loop, lanes=_MANY)) if len(near) > 1 else {}
    if of_many or not loop.bound_is_loose:
        return of_many, {}
    near = [kind for kind, time in times.items() if time <= _LOST * fastest]
    return of_many, _times_of(near, replace(loop, lanes=_SOME))


def _times_of(kinds: Iterable[Kind], loop: LoopFacts) -> dict[Kind, float]:
    costs = {kind: kind.cost(loop) for kind in kinds}
    return {kind: cost.time for kind, cost in costs.items() if cost}


def smallest_of_fastest(times: Mapping[Kind, float], costs: Mapping[Kind, Cost]) -> Kind:
    """Of the kinds whose times are taken for equal to the least, the one that stores least."""
    near = [kind for kind, time in times.items() if time <= _NEAR * min(times.values())]
    return min(near, key=lambda kind: costs[kind].memory)


def _losses(of_one: Mapping[Kind, float], of_some: Mapping[Kind, float]) -> dict[Kind, float]:
    """The time of each kind over that of the fastest, with one lane or with some: the larger ratio."""
    fastest = min(of_one.values()), min(of_some.values())
    return {kind: max(of_one[kind] / fastest[0], time / fastest[1]) for kind, time in of_some.items()}


def _kinds(loop: LoopFacts, bound: int, budget: int) -> list[Kind]:
    """Those that there are to choose from, with as many checkpoints as have room in so many bytes."""
    kinds: list[Kind] = [Residuals(), Bounded(), Checkpointed()._within(budget, loop)]
    if loop.is_fixed and loop.step.carry_bytes and bound * loop.residuals.stored_bytes > budget:
        kinds.append(Checkpointed(min(budget // loop.step.carry_bytes, bound)))
    return kinds


def _listed(times: Mapping[Kind, float]) -> str:
    return ", ".join(f"{_name(kind)} {time:.0f}" for kind, time in times.items())


def _name(kind: Kind) -> str:
    number = getattr(kind, "checkpoints", None)
    return type(kind).__name__ + ("" if number is None else f"({number})")
