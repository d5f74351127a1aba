"""What the kinds that store something for every step have in common."""

from loopax._src.core import Cost, LoopFacts
from loopax._src.core.jaxpr.costs import costs

# A loose bound: a loop is expected to take this share of its steps. Rows are set to zero for all of them, so they may
# have no more than this share of the memory.
LOOSE_BOUND_STEPS = 1 / 2
LOOSE_BOUND_MEMORY = 1 / 8


def cost_of_rows(loop: LoopFacts, row_bytes: int, added: float, read_bytes: int = 0) -> Cost | None:
    """The cost of a row for every step, and of what is added to a step besides.

    Where more is read than stored, a step takes as long as if all of it was stored: XLA fuses less of it.
    """
    if loop.bound is None:
        return None
    stored = costs().storing(row_bytes, loop.bound * row_bytes) / (LOOSE_BOUND_STEPS if loop.bound_is_loose else 1)
    time = stored + costs().computed_byte * max(read_bytes - row_bytes, 0)
    memory = loop.bound * row_bytes / (LOOSE_BOUND_MEMORY if loop.bound_is_loose else 1)
    return Cost(memory, time + added)
