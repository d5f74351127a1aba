"""`Lax`: the loop as `jax.lax` has it."""

from dataclasses import dataclass

from loopax._src import core
from loopax._src.kinds.base import Kind


@dataclass(frozen=True)
class Lax(Kind):
    """The loop as `jax.lax` has it.

    Reverse mode works where it does in `jax.lax`, for a fixed number of steps, and stores what
    `jax.lax.scan` stores; elsewhere it is an error. Forward mode and `jax.vmap` work always.
    Body evaluations for forward and gradient: n. Bound: not needed.
    """

    def storage(self, bound: int | None, fixed: bool, bound_is_loose: bool) -> core.Storage:
        """See `Kind.storage`."""
        del bound, bound_is_loose
        if fixed:
            return core.EveryResidual()
        return core.Nothing(
            ValueError,
            "reverse mode through a loop of kind `Lax()` whose number of steps is not fixed when it is traced. "
            "Choose a kind that has it: `Checkpointed()` (some carries), or, with a static bound such as `max_steps=`, "
            "`Bounded()` (every carry) or `Residuals()` (what `jax.lax.scan` stores).",
        )
