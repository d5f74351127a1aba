"""`Bounded`: every carry is stored, and every step evaluated again for its derivative."""

from dataclasses import dataclass

from loopax._src import core
from loopax._src.kinds.base import Kind, need_bound


@dataclass(frozen=True)
class Bounded(Kind):
    """Store every carry, and evaluate every step again for its derivative.

    Body evaluations for forward and gradient: 2n. Needs a static bound: `max_steps`, the rows of `xs`,
    or a static length.
    """

    def storage(self, bound: int | None, fixed: bool, bound_is_loose: bool) -> core.Storage:
        """See `Kind.storage`."""
        del fixed, bound_is_loose
        need_bound(self, bound)
        return core.EveryCarry()
