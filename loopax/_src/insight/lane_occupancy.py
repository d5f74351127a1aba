"""What a batch of loops computes, from the numbers of steps of its lanes: no program is run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loopax._src.core.ir.lane_stages import Stages


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


def lockstep(steps: np.ndarray) -> list[Stretch]:
    """All lanes until the slowest is done."""
    return [_stretch(steps, len(steps), 0, int(steps.max(initial=0)))]


def in_groups(steps: np.ndarray, stages: Stages) -> list[Stretch]:
    """`Compact` where the numbers of steps are known at the start."""
    ordered, start, found = np.sort(steps)[::-1], 0, []
    for number, size in stages.groups(len(steps)):
        for _ in range(number):
            group, start = ordered[start : start + size], start + size
            found.append(_stretch(group, size, 0, int(group.max(initial=0))))
    return found


def in_stages(steps: np.ndarray, stages: Stages) -> list[Stretch]:
    """`Compact` where they are not."""
    ordered, sizes, row, found = np.sort(steps)[::-1], stages.sizes(len(steps)), 0, []
    for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
        end = max(int(ordered[smaller]) if smaller < len(ordered) else 0, row)
        found.append(_stretch(ordered[:size], size, row, end))
        row = end
    return found


def sequential(steps: np.ndarray) -> list[Stretch]:
    """One lane after another."""
    return [Stretch(1, steps.sum(keepdims=True), np.ones(1, np.int64))]


def _stretch(steps: np.ndarray, lanes: int, start: int, end: int) -> Stretch:
    """Rows `start ... end - 1`. A run ends where a lane does."""
    ends = np.unique(np.clip(np.append(steps, [start, end]), start, end))
    active = len(steps) - np.searchsorted(np.sort(steps), ends[:-1], side="right")
    return Stretch(lanes, np.diff(ends), active)


@dataclass(frozen=True)
class Nested:
    """Iterations of a batch of nested loops."""

    iterations: int  # of the inner loop's body
    outer_evaluations: int  # of what stands before and after it


def nested_lockstep(inner: Sequence[np.ndarray]) -> Nested:
    """Every outer step waits for the lane with the most inner steps; `inner`: those of each lane."""
    most = max((len(lane) for lane in inner), default=0)
    longest = [max(int(lane[k]) for lane in inner if k < len(lane)) for k in range(most)]
    return Nested(sum(longest), most)


def free(inner: Sequence[np.ndarray]) -> Nested:
    """Lanes that do not wait: an outer step takes an iteration for each inner step, and one if there is none."""
    ends = [np.cumsum(np.maximum(lane, 1)) for lane in inner]
    iterations = max((int(lane[-1]) for lane in ends if len(lane)), default=0)
    return Nested(iterations, len(set(_all(ends))))


def _all(arrays: Sequence[np.ndarray]) -> Iterator[int]:
    for array in arrays:
        yield from array.tolist()
