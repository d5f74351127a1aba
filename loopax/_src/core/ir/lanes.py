"""Lanes: how a batch of loops under `jax.vmap` runs, when its lanes take different numbers of steps."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np

from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import Why, code_of_call, no_choice, positive_int, refuse_arrays, refuse_tracers
from loopax._src.settings import calibration

# Lanes that keep a device busy: those of a CPU are measured (docs/benchmark-details.md), others guessed. A group walks
# forward and back; a stage walks forward only, and is worth it with fewer lanes.
CPU_LANES, CPU_STAGE, OTHER_LANES = 32, 4, 4096
_MOST_COUNTS = 256  # that are kept
_STAGES = Why("the sizes of the batches in the program", "choose one for all calls: results do not depend on it")
_LANES = Why("how the program runs a batch", "choose one for all calls: results do not depend on it")


class Lanes:
    """How a batch of loops runs under `jax.vmap`. Use one of the subclasses."""


@dataclass(frozen=True)
class Lockstep(Lanes):
    """Run all lanes together until the slowest lane has finished (the default).

    A lane is one loop of the batch. A finished lane keeps its carry, and causes no NaN, no error, no effect, and no
    iteration of a loop in the body.

    A batch evaluates the body, lane by lane, as often as the number of lanes times the steps of the slowest lane.
    """


@api_boundary
@dataclass(frozen=True)
class Compact(Lanes):
    """Remove finished lanes from the batch, so that the batch becomes smaller.

    Results are those of `Lockstep()`, in the same order. How the batch becomes smaller depends on the loop:

    - If the numbers of steps are known at the start (`fori_loop`, `scan` without `stop`), lanes are sorted by the
      number of steps. They run in groups, one group after another. The eighth of the lanes with the most steps runs in
      groups of `min_lanes`. The others run in groups of an eighth of the lanes, but of at most about four times
      `min_lanes`.
    - If the numbers of steps are not known (`while_loop`, `scan` with `stop`), lanes run in stages. A stage is a batch
      with a fixed number of places. It runs until few enough lanes are left for the next stage, which is smaller. On a
      CPU, the first stage may have fewer places than there are lanes: lanes that wait then take the places of lanes
      that have finished. Otherwise all lanes start together.

    Parameters
    ----------
    shrink
        The size of a stage divided by the size of the next stage: a number from 2 on. The first stage is then as large
        as the batch. None: as few stages as are about as fast, by what a step costs (docs/lanes.md). 2 compiles more
        stages, and is a few per cent faster than None.
    min_lanes
        The fewest lanes in a group or a stage, from 1 on: as many as keep the device busy. A batch that is smaller
        itself stays as it is. None: on a CPU 4 for stages and 32 for groups, on other devices 4096 (not measured).

    Raises
    ------
    TypeError
        `shrink` is not a number, `min_lanes` is not an int, or one of them is traced.
    ValueError
        `shrink` is less than 2, or `min_lanes` is less than 1.
    NotImplementedError
        Raised by the loop: the body communicates over the mapped axis (`jax.lax.psum`), and lanes stop at different
        steps.

    Notes
    -----
    Compile time: groups take about 3 times as long as lockstep, and stages of 1024 lanes about 3.5 times.

    Reverse mode always runs in groups. Stages store nothing, so after stages reverse mode runs the forward pass once
    more.

    A batch in which all lanes take the same number of steps gains nothing. A loop that is not batched does not change.

    A second `jax.vmap` under which lanes take different numbers of steps joins the same batch. Exception: one map has
    values that the other map does not have (such as weights), and the joint batch would repeat these values until the
    operands of the loop take more than twice the memory.

    """

    shrink: float | None = None
    min_lanes: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.shrink is not None:
            refuse_arrays("Compact(shrink=...)", self.shrink, "a Python number", _STAGES)
            if isinstance(self.shrink, bool) or not isinstance(self.shrink, Real):
                raise TypeError(
                    f"Compact(shrink=...): got {describe(self.shrink)}, expected a number from 2 on, the size of a "
                    "stage over that of the next."
                )
            if not float(self.shrink) >= 2:
                raise ValueError(
                    f"Compact(shrink=...): got {self.shrink}, expected at least 2, the size of a stage over that of "
                    "the next. Smaller steps cost more gathering and compiling than they save."
                )
        if self.min_lanes is not None:
            lanes = positive_int("Compact(min_lanes=...)", self.min_lanes, "lanes", _STAGES)
            object.__setattr__(self, "min_lanes", lanes)

    def __repr__(self) -> str:
        """Return the code that makes this object."""
        return code_of_call("Compact", shrink=self.shrink, min_lanes=self.min_lanes)


@dataclass(frozen=True)
class Free(Lanes):
    """Let lanes of nested loops continue without waiting for each other between outer steps.

    In lockstep, each outer step waits for the lane with the most inner steps. With `Free()` on the outermost loop, a
    lane that has finished an inner loop goes on, to its next outer step too, while other lanes are still in that loop.
    The batch takes at most as many iterations as the largest sum of a lane's steps of the innermost loops; an outer
    step counts as one for each loop in it without steps.

    The body may hold any number of loops of loopax: one after another, in each other, in `loopax.cond` and
    `loopax.switch`, in `jax.jit` and in `jax.checkpoint`. An inner loop whose length is the same for all lanes stays as
    it is.

    Raises
    ------
    ValueError
        Raised by the loop:

        - The body holds no loop.
        - An inner loop stands in `jax.lax.cond`, `jax.lax.scan` or `jax.lax.while_loop`.
        - An inner loop has another `kind` than the outermost loop, and not "auto". Or it has `lanes`.
        - The kind stores every step, and one of the loops has no static bound.
    NotImplementedError
        Raised by the loop: it has `derivative=` or the kind `Reversible`; or an inner loop has one of them, or
        `progress=`.

    Notes
    -----
    Cost: the code between the loops runs for all lanes whenever any lane needs it. In a large batch, this code runs in
    nearly every iteration; in lockstep, it runs once per outer step. So lanes wait for each other where it costs much.
    Free lanes are slower if this code costs more than the saved inner steps. `lane_report` counts how often this code
    runs. Free lanes are also slower for a loop that is not batched.

    On a CPU, code that costs much runs for those lanes that need it, in batches of 16.

    Gradients: one loop is made of all, and `kind` of the outermost one says what is stored of its steps. A
    `jax.checkpoint` around an inner loop says nothing then, nor does its policy.

    Rows of `xs` of all loops are gathered for each lane, and rows of `ys` are written into each lane's own array. The
    time of both grows with the number of rows.

    """


@dataclass(frozen=True)
class Sequential(Lanes):
    """Run one lane after another, each alone.

    Each lane has the same bits as without `jax.vmap`, also if all lanes take the same number of steps. The batch
    evaluates the body as often as all lanes together take steps.

    On a CPU, `Sequential()` is faster than a batch if a step is costly and the numbers of steps differ much. If a step
    is cheap, a batch is faster, because lanes share the overhead of each XLA operation.

    Raises
    ------
    NotImplementedError
        Raised by the loop: the body communicates over the mapped axis (`jax.lax.psum`).

    Notes
    -----
    A gradient outside of `jax.vmap` stores for every lane what the kind stores. The gradient adds the cotangents of
    shared weights in place.

    """


@api_boundary
@dataclass(frozen=True)
class AutoLanes(Lanes):
    """Choose lockstep, compact or sequential lanes by estimated time. On a GPU: lockstep or compact.

    The choice depends on the number of lanes, and on the estimated time of a step for one lane and for a batch. Results
    are the same up to rounding.

    Parameters
    ----------
    counts
        The numbers of steps that lanes are expected to take: one real number from 0 on for each lane, or for each of
        others that are alike, such as those of a run before. Or the `LaneReport` of a run. Only their distribution
        matters, not their order. None: they are taken to have an exponential distribution.

    Raises
    ------
    TypeError
        `counts` holds no real numbers, or is traced.
    ValueError
        `counts` has not one axis, is empty, or holds a number that is negative, infinite or NaN.
    NotImplementedError
        Raised by the loop: the body communicates over the mapped axis (`jax.lax.psum`), and lanes stop at different
        steps.

    Notes
    -----
    The choice is made when the program is traced, where the numbers of steps are not known. `explain` shows the
    estimates. Where steps that cost little run in lockstep, a gradient of many lanes runs in groups, as `Compact()`.

    """

    counts: Any = None

    def __post_init__(self) -> None:
        """Check the counts, and keep how they are distributed: at most so many of them, in order."""
        if self.counts is None:
            return
        given = getattr(self.counts, "steps", self.counts)
        refuse_tracers("AutoLanes(counts=...)", given, "numbers of steps", _LANES)
        counts = np.asarray(given)
        if counts.dtype == bool or not np.issubdtype(counts.dtype, np.number) or np.iscomplexobj(counts):
            raise TypeError(f"AutoLanes(counts=...): got {describe(given)}, expected a real number for each lane.")
        if counts.ndim != 1 or not counts.size or not (np.isfinite(counts) & (counts >= 0)).all():
            raise ValueError(
                f"AutoLanes(counts=...): got {describe(given)}, expected a finite number from 0 on for each lane: "
                "shape (lanes,)."
            )
        ordered = np.sort(counts.astype(float))[::-1]
        if len(ordered) > _MOST_COUNTS:
            ordered = ordered[np.linspace(0, len(ordered) - 1, _MOST_COUNTS).round().astype(int)]
        object.__setattr__(self, "counts", tuple(ordered.tolist()))

    def __repr__(self) -> str:
        """Return the code that makes this object, without the numbers."""
        return "AutoLanes()" if self.counts is None else "AutoLanes(counts=...)"


# The smaller batches of `Compact`: stages or groups of lanes, and how large they are.
#
# On a CPU (docs/benchmark-details.md): an eighth of the lanes is in the smallest groups. The others are in groups of
# an eighth of the lanes, and at most so many times as large.
PART = 8
LARGER = 4
# Stages by default: half of the lanes, then half of these, and so forth. Most steps are taken by many lanes; few lanes
# take the last steps, and a stage for them saves less than it takes to compile.
SHRINKS = (2.0, 2.0, 2.7, 3.0)
LAST_SHRINK, FEW_LANES = 4.0, 64
FEWEST_IF_CHEAP = 32  # of a step that costs little, a larger batch costs little more
# Two or three stages that are refilled take about as long as six that are not, and are compiled in half of the time.
SHRINK_IF_REFILLED = 8
REFILL_AT = 3 / 4  # of its places: when no more lanes go on


class Stage(NamedTuple):
    """A batch of so many places, until few enough lanes are left.

    A stage with fewer places than lanes is refilled: places of lanes that have finished are given to lanes that wait.
    """

    places: int
    leave: int  # lanes, for the next stage


def stages(
    compact: Compact, lanes: int, shrink: float | None = None, places: Callable[[int], int] | None = None
) -> list[Stage]:
    """The stages of a batch. A step that costs little has fewer of them, each smaller by `shrink` than the one before.

    `places`: of a stage for so many lanes that is refilled, zero if it should not be; None if no stage may be.
    """
    sizes = _sizes(compact, lanes, shrink)
    found = _one_after_another(sizes)
    if places is None or compact.shrink is not None or calibration().platform != "cpu":
        return found
    fewest = fewest_lanes(compact, CPU_STAGE)
    for index, size in enumerate(sizes):
        if (refilled := places(size)) >= fewest:
            smaller = [refilled]
            while smaller[-1] // SHRINK_IF_REFILLED >= fewest:
                smaller.append(smaller[-1] // SHRINK_IF_REFILLED)
            return [*found[:index], *_one_after_another(smaller)]
    return found


def _one_after_another(sizes: list[int]) -> list[Stage]:
    return [Stage(size, leave) for size, leave in zip(sizes, [*sizes[1:], 0], strict=True)]


def _sizes(compact: Compact, lanes: int, shrink: float | None) -> list[int]:
    """Of stages that are not refilled, from the whole batch down."""
    fewest = fewest_lanes(compact, CPU_STAGE)
    if shrink is not None and compact.shrink is None:
        fewest = max(fewest, FEWEST_IF_CHEAP)
    sizes, shrink = [lanes], compact.shrink or shrink
    while True:
        of_many = SHRINKS[min(len(sizes), len(SHRINKS)) - 1]
        smaller = -int(-sizes[-1] // (shrink or (of_many if sizes[-1] > FEW_LANES else LAST_SHRINK)))
        if smaller < fewest or smaller >= sizes[-1]:
            return sizes
        sizes.append(smaller)


def group_sizes(compact: Compact, lanes: int) -> list[tuple[int, int]]:
    """The groups of a batch whose lanes are sorted by their numbers of steps: how many groups, of how many lanes each.

    The lanes with the most steps differ most, so they are in smaller groups. All groups together may have a few places
    more than there are lanes.
    """
    fewest = fewest_lanes(compact, CPU_LANES)
    if lanes < 2 * fewest:
        return [(1, lanes)]
    few = max(lanes // PART // fewest, 1)
    others = lanes - few * fewest
    size = min(max(lanes // PART, fewest), LARGER * fewest)
    number = max(others // size, 1)
    return [(few, fewest), (number, -(-others // number))]


def fewest_lanes(compact: Compact, on_cpu: int) -> int:
    """The fewest lanes in a group or a stage; `on_cpu`: if the user has not said, on a CPU."""
    if compact.min_lanes is not None:
        return compact.min_lanes
    return on_cpu if calibration().platform == "cpu" else OTHER_LANES


LanesLike = Lanes | Literal["lockstep", "compact", "sequential", "auto", "free"]
_BY_NAME: dict[str, type[Lanes]] = {
    "lockstep": Lockstep,
    "compact": Compact,
    "sequential": Sequential,
    "auto": AutoLanes,
    "free": Free,
}


def to_lanes(lanes: LanesLike) -> Lanes:
    """The object behind the `lanes` argument."""
    refuse_tracers("lanes=...", lanes, "a way to run lanes or the name of one", _LANES)
    if isinstance(lanes, Lanes):
        return lanes
    if isinstance(lanes, str) and lanes in _BY_NAME:
        return _BY_NAME[lanes]()
    raise ValueError(no_choice("lanes", lanes, "a way to run lanes", _BY_NAME, {}))
