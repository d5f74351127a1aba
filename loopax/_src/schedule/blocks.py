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
    """Return the number of steps in a block, for at most `bound` steps and a carry of `carry_bytes` bytes.

    The size is about sqrt(bound). Then the number of stored carries (one for each block, and those of one block) is as
    small as possible with two levels: about 2 sqrt(bound). Tiny carries have shorter blocks.
    """
    balanced = isqrt(max(bound - 1, 0)) + 1
    quick = max(SMALL_LOOP_BYTES // max(carry_bytes, 1), 1)
    if quick < balanced and carry_bytes * -(-bound // quick) <= SMALL_STORE_BYTES:
        return quick
    return balanced


def shortest_block(bound: int, checkpoints: int) -> int | None:
    """Return the fewest steps in a block for which two levels store at most `checkpoints` carries, or None.

    None: there are too few checkpoints for two levels. A shorter block recomputes fewer steps: all steps of a block but
    the last are recomputed.
    """
    sizes = (size for size in range(2, isqrt(bound) + 2) if -(-bound // size) + size <= checkpoints)
    return next(sizes, None)


class LastSteps(NamedTuple):
    """Two levels of blocks; the forward pass stores the residuals of the last steps, and recomputed steps store theirs.

    Attributes
    ----------
    recorded : int
        The number of last steps whose residuals the forward pass stores.
    block : int
        The number of steps in a block of the other steps.

    """

    recorded: int  # so many last steps
    block: int  # steps per block of the others


def last_steps(num_steps: int, room: int, carry: int, residuals: int) -> LastSteps | None:
    """Return for how many of the last steps the residuals fit into the given memory; None if even blocks do not fit.

    The gradient evaluates `2 num_steps - recorded` steps.

    Parameters
    ----------
    num_steps
        The number of steps that the loop takes.
    room
        The memory, in any unit.
    carry, residuals
        The size of a carry, and of the residuals of a step, in the same unit.

    Notes
    -----
    While the forward pass stores residuals, the carries at the starts of blocks are stored, too. Later, the residuals
    or carries of one recomputed block use the memory of the forward pass's residuals.

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
    """Yield the actions of the two-level schedule: store the start of each block, recompute one block at a time.

    The schedule stores at most `ceil(num_steps / block) + block` carries, and advances no step more than twice. The
    file `core/lowering/sweep_two_level.py` compiles the same schedule.

    Parameters
    ----------
    num_steps
        The number of steps that the loop took.
    block
        The number of steps in a block.
    records
        Whether recomputed steps store their residuals in place of carries. The default is False.
    recorded
        The number of last steps whose residuals the forward pass stores. The default is 0.

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
