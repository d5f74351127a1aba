"""`Residuals`: what the derivative of every step needs is stored, and nothing evaluated again."""

from dataclasses import dataclass

from loopax._src import core
from loopax._src.kinds.base import Kind, need_bound


@dataclass(frozen=True)
class Residuals(Kind):
    """Store what the derivative of every step needs, as `jax.lax.scan` does; evaluate nothing again.

    Body evaluations for forward and gradient: n. Needs a static bound: `max_steps`, the rows of `xs`,
    or a static length.
    """

    def storage(self, bound: int | None, fixed: bool, bound_is_loose: bool) -> core.Storage:
        """See `Kind.storage`."""
        del fixed, bound_is_loose
        need_bound(self, bound)
        return core.EveryResidual()
