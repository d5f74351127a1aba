"""The two-level schedule: keep the carry at the start of every block, replay one block at a time."""

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

from loopax._src.schedule.actions import Action

# XLA's CPU backend compiles a loop whose whole state is smaller than this to one function, without a
# call per operation: tiny loops run several times faster (measured in docs/how-it-works.md).
SMALL_LOOP_BYTES = 512
# Blocks may be shorter than sqrt(N) for the sake of such loops as long as the kept carries stay below:
SMALL_STORE_BYTES = 8 * 1024


def block_size(bound: int, carry_bytes: int) -> int:
    """Steps per block for at most `bound` steps of a carry of so many bytes.

    About sqrt(bound), so that the blocks and the steps of one block, which are all that is stored,
    are as few as possible together: 2 sqrt(bound). Tiny carries get shorter blocks.
    """
    balanced = isqrt(max(bound - 1, 0)) + 1
    quick = max(SMALL_LOOP_BYTES // max(carry_bytes, 1), 1)
    if quick < balanced and carry_bytes * -(-bound // quick) <= SMALL_STORE_BYTES:
        return quick
    return balanced


def shortest_block(bound: int, checkpoints: int) -> int | None:
    """The fewest steps per block with which two levels store at most so many carries; None: there are too few.

    The shorter a block, the fewer steps are evaluated again: all but the last one of each block are.
    """
    sizes = (size for size in range(2, isqrt(bound) + 2) if -(-bound // size) + size <= checkpoints)
    return next(sizes, None)


class LastSteps(NamedTuple):
    """Two levels in which the forward pass stores the residuals of the last steps. Replays store residuals, too."""

    recorded: int  # so many last steps
    block: int  # steps per block of the others


def last_steps(num_steps: int, room: int, carry: int, residuals: int) -> LastSteps | None:
    """The most last steps whose residuals can be stored in so much room; None: there is no room for blocks, either.

    The gradient evaluates `2 num_steps - recorded` steps. While the forward pass stores residuals, the carries at the
    starts of blocks are stored, too. Later these carries and what one block stores have the same room.

    Parameters
    ----------
    num_steps
        The steps that the loop takes.
    room
        The memory, in any unit.
    carry, residuals
        The sizes of a carry and of the residuals of a step, in the same unit.

    """
    for starts in range(room // carry + 1):
        left = room - starts * carry
        recorded = min(left // max(residuals, 1), num_steps)
        if recorded == num_steps:
            return LastSteps(recorded, 1)
        if starts:
            block = -(-(num_steps - recorded) // starts)
            if block * max(carry, residuals) <= left:
                return LastSteps(recorded, block)
    return None


def two_level(num_steps: int, block: int, records: bool = False, recorded: int = 0) -> Iterator[Action]:
    """The schedule for a loop that took so many steps: the meaning of what `core/lowering/sweep_two_level.py` compiles.

    At most `ceil(num_steps / block) + block` carries are stored, and no step is advanced more than twice. A replay that
    `records` stores residuals in place of carries. Those of so many last steps are `recorded` on the way forward.
    """
    replayed = num_steps - recorded
    for step in range(replayed):
        if step % block == 0:
            yield Action("keep", step)
        yield Action("advance", step)
    yield from (Action("record", step) for step in range(replayed, num_steps))
    yield from (Action("reverse", step) for step in reversed(range(replayed, num_steps)))
    num_steps = replayed
    for start in reversed(range(0, num_steps, block)):
        end = min(start + block, num_steps)
        yield Action("restore", start)
        if records:
            yield Action("drop", start)
            yield from (Action("record", step) for step in range(start, end))
            yield from (Action("reverse", step) for step in reversed(range(start, end)))
            continue
        for step in range(start, end - 1):
            yield Action("advance", step)
            yield Action("keep", step + 1)
        for step in reversed(range(start, end)):
            yield Action("restore", step)
            yield Action("reverse", step)
            yield Action("drop", step)
