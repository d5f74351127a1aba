"""What the kinds that store something for every step have in common."""

from loopax._src.core import Cost, LoopFacts
from loopax._src.core.jaxpr.cost import storing

# A loose bound: a loop is expected to take this share of its steps. Rows are set to zero for all of them, so they may
# have no more than this share of the memory.
LOOSE_BOUND_STEPS = 1 / 2
LOOSE_BOUND_MEMORY = 1 / 8


def cost_of_rows(loop: LoopFacts, row_bytes: int, evaluations: int, read_bytes: int = 0) -> Cost | None:
    """The cost of a row for every step, and of so many evaluations of a step besides the first.

    Where more is read than stored, a step takes as long as if all of it was stored: XLA fuses less of it.
    """
    if loop.bound is None:
        return None
    most = max(row_bytes, read_bytes)
    time = storing(most, loop.bound * most) / (LOOSE_BOUND_STEPS if loop.bound_is_loose else 1)
    memory = loop.bound * row_bytes / (LOOSE_BOUND_MEMORY if loop.bound_is_loose else 1)
    return Cost(memory, time + evaluations * loop.step.evaluation)
