"""The two-level schedule: keep the carry at the start of every block, replay one block at a time."""

from collections.abc import Iterator
from math import isqrt

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


def two_level(num_steps: int, block: int, records: bool = False) -> Iterator[Action]:
    """The schedule for a loop that took so many steps: the meaning of what `core/lowering/sweep_two_level.py` compiles.

    At most `ceil(num_steps / block) + block` carries are stored, and no step is advanced more than twice. A replay that
    `records` stores residuals in place of carries.
    """
    for step in range(num_steps):
        if step % block == 0:
            yield Action("keep", step)
        yield Action("advance", step)
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
