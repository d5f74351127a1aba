"""What a batch of loops wastes: `lane_report`."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from loopax._src.core.ir.annotations import BlockInfo
from loopax._src.core.ir.lanes import REFILL_AT, Compact, LanesLike, group_sizes, stages, to_lanes
from loopax._src.core.jaxpr.cost import StepCost
from loopax._src.extras import optional
from loopax._src.insight.nest_report import Nested, nest_in_free_lanes, nest_in_lockstep
from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.leaves import LoopInfo, describe
from loopax._src.queues.lanes_stream import LanesStream

# What a batch of loops computes, from the numbers of steps of its lanes: no program is run.


@dataclass(frozen=True)
class Stretch:
    """Batched iterations of the same number of lanes: runs of iterations in which as many are active."""

    lanes: int  # that are computed
    lengths: np.ndarray  # of the runs, in iterations
    active_in_run: np.ndarray  # how many lanes take a step of their own

    @property
    def iterations(self) -> int:
        """How many there are."""
        return int(self.lengths.sum())

    @property
    def active(self) -> np.ndarray:
        """In each iteration, how many lanes take a step of their own. An array as long as there are iterations."""
        return np.repeat(self.active_in_run, self.lengths)

    @property
    def lane_steps(self) -> int:
        """Body evaluations, lane by lane."""
        return self.lanes * self.iterations


def in_groups(steps: np.ndarray, how: Compact) -> list[Stretch]:
    """`Compact` where the numbers of steps are known at the start."""
    sizes = [size for number, size in group_sizes(how, len(steps)) for _ in range(number)]
    groups = np.split(np.sort(steps)[::-1], np.cumsum(sizes)[:-1])
    return [_stretch(group, size, 0, int(group.max(initial=0))) for group, size in zip(groups, sizes, strict=True)]


# What a step costs is not known here. It decides how many places there are: say, that of a small network.
_STEP = StepCost(of_lane=100.0, of_batch=1800.0, alone=0.0)


def in_stages(steps: np.ndarray, how: Compact) -> list[Stretch]:
    """`Compact` where they are not."""
    left, found = steps[steps > 0], []
    for places, leave in stages(how, len(steps), places=partial(_STEP.places, 0)):
        turns = [Stretch(places, np.array([], np.int64), np.array([], np.int64))]
        while len(left) > leave:
            here, waiting = left[:places], left[places:]
            last = int(places * REFILL_AT) if len(waiting) else leave
            end = int(np.sort(here)[::-1][last]) if last < len(here) else 0
            turns.append(_stretch(here, places, 0, end))
            here = here - end
            left = np.concatenate([here[here > 0], waiting])
        lengths, active = (np.concatenate(x) for x in zip(*((t.lengths, t.active_in_run) for t in turns), strict=True))
        found.append(Stretch(places, lengths, active))
    return found


def _stretch(steps: np.ndarray, lanes: int, start: int, end: int) -> Stretch:
    """Rows `start ... end - 1`. A run ends where a lane does."""
    ends = np.unique(np.clip(np.append(steps, [start, end]), start, end))
    active = len(steps) - np.searchsorted(np.sort(steps), ends[:-1], side="right")
    return Stretch(lanes, np.diff(ends), active)


@dataclass(frozen=True)
class LaneReport:
    """What a batch of loops computes with each way to run its lanes.

    A lane-step is one evaluation of the body for one lane. A lane-step is useful if the lane has not finished.

    A `Stretch` is a sequence of batched iterations with the same number of lanes. Its field `lanes` is this number; its
    field `active` has, for each iteration, the number of lanes that have not finished.

    Attributes
    ----------
    steps : int64[lanes]
        The number of steps of each lane.
    lockstep : list of Stretch
        The iterations of `Lockstep()`.
    groups : list of Stretch
        The iterations of `Compact()` if the numbers of steps are known at the start.
    stages : list of Stretch
        The iterations of `Compact()` if they are not known.
    sequential : list of Stretch
        The iterations of `Sequential()`, one lane at a time.
    nested, free : Nested or None
        For nested loops in lockstep (`nested`) and with `Free()` (`free`): the number of `iterations`; and of each
        block, from the inside out, how often it is evaluated for the batch (`evaluations`), and the share of the lanes
        that take a step there (`useful`). Blocks are a step of the innermost loop, and what stands around a loop in a
        step of the loop around it.

    """

    steps: np.ndarray
    lockstep: list[Stretch]
    groups: list[Stretch]
    stages: list[Stretch]
    sequential: list[Stretch]
    nested: Nested | None
    free: Nested | None

    @property
    def useful(self) -> int:
        """The number of useful lane-steps."""
        return int(self.steps.sum())

    def share(self, stretches: list[Stretch]) -> float:
        """Return the share of useful lane-steps in these stretches; 1 if there are no lane-steps."""
        return self.useful / (sum(s.lane_steps for s in stretches) or 1) if self.useful else 1.0

    def __str__(self) -> str:
        """Return the report as a table."""
        steps = self.steps
        if not len(steps):
            return "no lanes"
        lines = [
            f"{len(steps)} lanes, {self.useful} steps: mean {steps.mean():.4g}, most {steps.max()}",
            f"{'lanes':<28}{'iterations':>12}{'lane-steps':>12}{'useful':>9}",
        ]
        names = "lockstep", "compact, steps known", "compact, steps not known", "sequential"
        ways = self.lockstep, self.groups, self.stages, self.sequential
        for name, stretches in zip(names, ways, strict=True):
            iterations, lane_steps = sum(s.iterations for s in stretches), sum(s.lane_steps for s in stretches)
            same = "  as in lockstep: too few lanes" if name.startswith("compact") and len(stretches) == 1 else ""
            lines.append(f"{name:<28}{iterations:>12}{lane_steps:>12}{self.share(stretches):>9.0%}{same}")
        if self.nested and self.free:
            lines.append(f"{'nested loops':<28}{'evaluated':>12}{'lane-steps':>12}{'useful':>9}")
            for name, found in (("lockstep", self.nested), ("free", self.free)):
                levels = len(found.evaluations)
                for place, (times, useful) in enumerate(zip(found.evaluations, found.useful, strict=True)):
                    block = f"rest of loop {levels - place}" if place else f"steps of loop {levels}"
                    lines.append(f"{f'{name}: {block}':<28}{times:>12}{times * len(steps):>12}{useful:>9.0%}")
        return "\n".join(lines)

    def plot(self, stretches: list[Stretch] | None = None, axes: Any = None) -> Any:
        """Draw the occupancy of the batch over time, and return the axes (needs matplotlib).

        Light: the lanes that each batched iteration computes. Dark: those lanes that have not finished. `stretches` is
        one of `lockstep` (the default), `groups`, `stages` and `sequential` of this report.
        """
        if axes is None:
            axes = optional("matplotlib.pyplot", "matplotlib", "A picture of lanes").subplots()[1]
        stretches = self.lockstep if stretches is None else stretches
        lanes = np.concatenate([np.full(len(s.lengths), s.lanes) for s in stretches])
        active = np.concatenate([s.active_in_run for s in stretches])
        edges = np.cumsum([0, *(length for s in stretches for length in s.lengths)])
        for heights, alpha, label in ((lanes, 0.3, "computed"), (active, 1.0, "useful")):
            axes.stairs(heights, edges, fill=True, color="C0", alpha=alpha, linewidth=0, label=label)
        axes.set(xlabel="batched iterations", ylabel="lanes", title=f"{self.share(stretches):.0%} useful")
        axes.margins(0)
        axes.legend(framealpha=1)
        return axes


@api_boundary
def lane_report(
    info: Any, inner: Any = None, *, lanes: LanesLike = "compact", blocks: Sequence[BlockInfo] = ()
) -> LaneReport:
    """Report how much of a batch's computation is wasted, for each way to run its lanes.

    ::

        result, info = jax.vmap(lambda x: lx.while_loop(..., info=True))(xs)
        print(lx.lane_report(info))

    Parameters
    ----------
    info
        The numbers of steps of all lanes: the `LoopInfo` of a batched loop, or an array of ints. All axes are axes of
        lanes. A stream has a report of its own: `stream.report()`.
    inner
        For nested loops: the numbers of steps of the inner loop in each outer step, as a `LoopInfo` or an array. The
        last axis is that of the outer steps. Return the inner `num_steps` as a row of `ys` of an outer `scan`. Rows
        beyond a lane's own steps are ignored. For loops in each other, a tuple of these, from the outside in: the last
        axes are those of the steps of all loops around the loop. None: the loops are not nested.
    lanes
        How the batch runs, as in the loop. `Compact(...)` has options that the report follows; all ways to run lanes
        are reported in any case.
    blocks
        For nested loops: the `blocks` of the outermost loop in an explanation (`explain(f, ...)`). Free lanes are then
        taken to wait at dear blocks, as they do there. Empty: no lane waits.

    Returns
    -------
    LaneReport
        The report: `print` shows a table, and `.plot()` draws the occupancy over time.

    Raises
    ------
    TypeError
        - `info` or `inner` is not a `LoopInfo` or an array of integers.
        - `info` or `inner` is traced; make reports outside of `jit`.
    ValueError
        - `inner` does not have one row for each lane, or has fewer outer steps than a lane took.
        - There is not one block for each loop: a body holds loops one after another, or a cheap inner loop is a part of
          its block.
        - A number of steps is negative.
        - `lanes` is unknown.

    Notes
    -----
    No loop is run: the report follows from the numbers of steps. Its time and memory depend on the number of lanes, and
    not on their steps; for nested loops, they grow with the steps.

    """
    if isinstance(info, LanesStream):
        raise TypeError("lane_report(info=...): got a stream, which has a report of its own: `stream.report()`.")
    counts = _counts("info", info)
    _refuse_negative("info", counts, counts < 0)
    steps = counts.reshape(-1)
    chosen = to_lanes(lanes)
    how = chosen if isinstance(chosen, Compact) else Compact()
    nested = free = None
    if inner is not None:
        levels = _levels(steps, inner if type(inner) is tuple else (inner,))
        if blocks and len(blocks) != len(levels):
            raise ValueError(
                f"lane_report(blocks=...): got {len(blocks)} blocks, expected {len(levels)}, one for each loop in "
                "`info` and `inner`. Where `explain` lists fewer, a cheap inner loop is a part of its block: leave its "
                "steps out. Where it lists more, loops stand one after another in a body: leave `blocks` out, and no "
                "lane is taken to wait."
            )
        nested, free = nest_in_lockstep(levels), nest_in_free_lanes(levels, blocks)
    in_lockstep = [_stretch(steps, len(steps), 0, int(steps.max(initial=0)))]  # all lanes until the slowest is done
    one_by_one = [Stretch(1, steps.sum(keepdims=True), np.ones(1, np.int64))]
    return LaneReport(steps, in_lockstep, in_groups(steps, how), in_stages(steps, how), one_by_one, nested, free)


def _counts(name: str, value: Any) -> np.ndarray:
    if type(value) in (tuple, list) and any(isinstance(part, LoopInfo) for part in value):
        raise TypeError(
            f"lane_report({name}=...): got a {type(value).__name__} that holds a `LoopInfo`, expected the `LoopInfo` "
            "alone. A loop with `info=True` returns a pair: `result, info = ...`, and `lane_report(info)`."
        )
    counts = value.num_steps if isinstance(value, LoopInfo) else value
    if isinstance(counts, Tracer):
        raise TypeError(
            f"lane_report({name}=...): got a traced value ({describe(counts)}). A report is made outside of `jit` and "
            "`vmap`: return the `LoopInfo` from there, and report on it."
        )
    try:
        array = np.asarray(counts if isinstance(counts, jax.Array | np.ndarray | list | tuple) else None)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"lane_report({name}=...): got {describe(value)}, expected a `LoopInfo` or an array of numbers of steps. "
            "A loop returns one with `info=True`."
        )
    return array.astype(np.int64)


def _refuse_negative(name: str, counts: np.ndarray, wrong: np.ndarray) -> None:
    if not wrong.any():
        return
    first = tuple(np.argwhere(wrong)[0].tolist())
    place = f"[{', '.join(map(str, first))}]" if first else ""
    raise ValueError(f"lane_report({name}=...): {name}{place} is {counts[first]}, expected 0 or more steps.")


def _levels(steps: np.ndarray, inner: Sequence[Any]) -> list[np.ndarray]:
    """The steps of the loops of each level, int64[lanes, *steps around it]; zeros where a lane takes no such step."""
    levels, is_taken = [steps], np.ones(len(steps), bool)
    for number, value in enumerate(inner):
        name = "inner" if len(inner) == 1 else f"inner[{number}]"
        given, most = _counts(name, value), [int(level.max(initial=0)) for level in levels]
        shape = given.shape[given.ndim - len(levels) :] if given.ndim >= len(levels) else ()
        fits = shape[:-1] == levels[-1].shape[1:] and given.size == len(steps) * math.prod(shape)
        if not shape or not fits or any(map(operator.lt, shape, most)):
            around = " x ".join(map(str, most))
            raise ValueError(
                f"lane_report({name}=...): got shape {given.shape}, expected {len(steps)} lanes of at least {around} "
                "steps of the loops around it, as `info` has. Return the inner loop's `num_steps` as a row of `ys` of "
                "the outer scan."
            )
        found = given.reshape(len(steps), *shape)
        is_taken = is_taken[..., None] & (np.arange(shape[-1]) < levels[-1][..., None])
        _refuse_negative(name, given, (is_taken & (found < 0)).reshape(given.shape))
        levels.append(np.where(is_taken, found, 0))
    return levels
