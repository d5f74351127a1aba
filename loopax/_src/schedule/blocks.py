"""The two-level schedule: the carry at the start of every block of steps is kept, one block replayed at a time."""

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

from loopax._src.schedule.binomial import Action

# XLA's CPU backend compiles a loop whose whole state is smaller than this to one function, without a
# call per operation: tiny loops run several times faster (measured in docs/how-it-works.md).
SMALL_LOOP_BYTES = 512
# Blocks may be shorter than sqrt(N) for the sake of such loops as long as the kept carries stay below:
SMALL_STORE_BYTES = 8 * 1024
# Blocks of equal size are loops whose lengths a compiler knows, and which a GPU runs without a look from the host. For
# them, so many times as many carries are stored, or steps evaluated again.
FOR_EVEN_BLOCKS = 1.05


def block_size(bound: int, carry_bytes: int, is_fixed: bool = False) -> int:
    """The number of steps in a block, for at most `bound` steps and a carry of `carry_bytes` bytes.

    About sqrt(bound): then two levels store the fewest carries (one for each block, and those of one block), about
    2 sqrt(bound). Tiny carries have shorter blocks. `is_fixed`: there are always `bound` steps.
    """
    size = _block_size(bound, carry_bytes)
    return _even(bound, size, bound) if is_fixed else size


def _block_size(bound: int, carry_bytes: int) -> int:
    balanced = isqrt(max(bound - 1, 0)) + 1
    quick = max(SMALL_LOOP_BYTES // max(carry_bytes, 1), 1)
    if quick < balanced and carry_bytes * -(-bound // quick) <= SMALL_STORE_BYTES:
        return quick
    return balanced


def _even(bound: int, size: int, checkpoints: int) -> int:
    """A block that divides the bound, if one is about as good as this; else this. It stores at most so many carries."""
    most = min(FOR_EVEN_BLOCKS * (-(-bound // size) + size), checkpoints)
    recomputed = bound - bound / size
    sizes = [s for s in range(2, 2 * size) if bound % s == 0 and bound // s + s <= most]
    sizes = [s for s in sizes if bound - bound / s <= FOR_EVEN_BLOCKS * recomputed]
    return min(sizes, key=lambda s: abs(s - size), default=size)


def shortest_block(bound: int, checkpoints: int) -> int | None:
    """The size of a block for which two levels store at most `checkpoints` carries; None: these are too few.

    The shortest, or one that divides the bound and is about as good. A shorter block recomputes fewer steps: all steps
    of a block but the last are recomputed.
    """
    sizes = (size for size in range(2, isqrt(bound) + 2) if -(-bound // size) + size <= checkpoints)
    size = next(sizes, None)
    return size and _even(bound, size, checkpoints)


class LastSteps(NamedTuple):
    """Two levels of blocks. The forward pass stores the residuals of the last steps, and recomputed steps theirs."""

    recorded: int  # so many last steps
    block: int  # steps per block of the others


def last_steps(bound: int, checkpoints: int, carry: int, residuals: int) -> LastSteps | None:
    """For how many of the last steps the residuals fit into the room of `checkpoints` carries.

    `carry` and `residuals` are the sizes of a carry, and of the residuals of a step. The gradient evaluates the body
    `2 * bound - recorded` times. None: even blocks do not fit, or with fewer than 2 sqrt(bound) carries, slots need
    fewer evaluations.
    """
    if checkpoints * checkpoints < 4 * bound:
        return None
    # While the forward pass stores residuals, the carries at the starts of blocks are stored, too. Later, what one
    # recomputed block stores takes the room of the forward pass's residuals.
    for starts in range(checkpoints + 1):
        left = (checkpoints - starts) * carry
        recorded = min(left // max(residuals, 1), bound)
        if recorded == bound:
            return LastSteps(recorded, 1)
        if starts:
            block = -(-(bound - recorded) // starts)
            if block * max(carry, residuals) <= left:
                return LastSteps(recorded, block)
    return None


def two_level(num_steps: int, block: int, records: bool = False, recorded: int = 0) -> Iterator[Action]:
    """The actions of the two-level schedule: store the start of each block of steps, recompute one block at a time.

    It stores at most `ceil(num_steps / block) + block` carries, and advances no step more than twice. Where it
    `records`, recomputed steps store residuals in place of carries. The forward pass stores the residuals of the last
    `recorded` steps. `core/lowering/sweep.py` compiles the same schedule.
    """
    replayed = num_steps - recorded
    for step in range(replayed):
        if step % block == 0:
            yield Action("keep", step)
        yield Action("advance", step)
    yield from (Action("record", step) for step in range(replayed, num_steps))
    yield from (Action("reverse", step) for step in reversed(range(replayed, num_steps)))
    for start in reversed(range(0, replayed, block)):
        end = min(start + block, replayed)
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
            yield from (Action("restore", step), Action("reverse", step), Action("drop", step))
