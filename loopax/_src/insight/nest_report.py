"""What a batch of loops in each other computes, in lockstep and with free lanes, from the numbers of their steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loopax._src.core.ir.annotations import BlockInfo
from loopax._src.core.jaxpr.cost import overhead
from loopax._src.core.waiting import blocks_that_run

# The blocks are a step of the innermost loop, and then what stands around the loop in a step of each loop, from the
# inside out: as `explain` lists them. `counts[level]` are the numbers of steps of the loops of a level, from the
# outside in: int[lanes, *steps of the levels before it], zero in steps that a lane does not take.


@dataclass(frozen=True)
class Nested:
    """What a batch of nested loops evaluates.

    Attributes
    ----------
    iterations : int
        Those of the innermost loop in lockstep, or of the single loop of free lanes.
    evaluations : tuple of int
        How often each block is evaluated for the batch: a step of the innermost loop; what stands around that loop in a
        step of the one around it; and so on, to a step of the outermost loop.
    useful : tuple of float
        Of the lanes for which a block is evaluated, the share that takes a step there.

    """

    iterations: int
    evaluations: tuple[int, ...]
    useful: tuple[float, ...]


def _nested(iterations: int, evaluations: Sequence[int], counts: Sequence[np.ndarray]) -> Nested:
    lanes, needed = len(counts[0]), [int(steps.sum()) for steps in reversed(counts)]
    shares = [n / (lanes * found) if found else 1.0 for n, found in zip(needed, evaluations, strict=True)]
    return Nested(iterations, tuple(evaluations), tuple(shares))


def nest_in_lockstep(counts: Sequence[np.ndarray]) -> Nested:
    """Every step of a loop waits for the lane with the most steps of the loop in it."""
    evaluations = [int(steps.max(axis=0, initial=0).sum()) for steps in reversed(counts)]
    return _nested(evaluations[0], evaluations, counts)


def nest_in_free_lanes(counts: Sequence[np.ndarray], blocks: Sequence[BlockInfo]) -> Nested:
    """Lanes that do not wait for each other, but where `blocks` say so; none do if there are no blocks."""
    lanes, levels = len(counts[0]), len(counts)
    waits = tuple(block.waits for block in blocks) or (False,) * levels
    costs = (*(block.nanoseconds for block in blocks), overhead(False, False)) if blocks else (1.0,) * (levels + 1)
    paths = [_path([steps[lane] for steps in counts], levels) for lane in range(lanes)]
    # What is next for each lane: the block, and where that stands in an iteration. Behind the last one: no block.
    most = max(map(len, paths), default=0)
    block, place = (np.full((lanes, most + 1), nothing) for nothing in (levels, 2 * levels))
    for lane, path in enumerate(paths):
        if path:
            block[lane, : len(path)], place[lane, : len(path)] = np.array(path).T
    every, at = np.arange(lanes), np.zeros(lanes, np.int64)
    lost, iterations, evaluations = np.zeros(levels, np.float32), 0, np.zeros(levels, np.int64)
    while (block[every, at] < levels).any():
        runs = np.ones(levels, bool)
        if any(waits):
            waiting = np.bincount(block[every, at], minlength=levels)[:levels].astype(np.float32)
            runs, lost = blocks_that_run(np, waiting, lost, costs, waits)
        is_evaluated = np.zeros(levels, bool)
        for here in range(2 * levels - 1):
            goes = (place[every, at] == here) & np.append(runs, False)[block[every, at]]
            is_evaluated[block[every, at][goes]] = True
            at = at + goes
        iterations, evaluations = iterations + 1, evaluations + is_evaluated
    return _nested(iterations, evaluations.tolist(), counts)


def _path(counts: Sequence[np.ndarray], levels: int) -> list[tuple[int, int]]:
    """The blocks that a lane passes, and where each stands in an iteration: a step, then ends, then beginnings.

    Two loops: the beginning of an outer step, its inner steps, then its end and the beginning of the next one at once,
    and so on. Ends stand from the inside out, beginnings from the outside in.
    """
    steps, *inner = counts
    if not inner:
        return [(0, 0)] * int(steps)
    if not steps:
        return []
    around = len(inner)
    begins, ends = (around, 2 * levels - 1 - around), (around, around)
    paths = [_path([rows[step] for rows in inner], levels) for step in range(int(steps))]
    return [begins, *(block for path in paths for block in (*path, ends))]
