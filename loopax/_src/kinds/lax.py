"""`Lax`: the loop as `jax.lax` has it."""

from dataclasses import dataclass

from loopax._src.core import EveryResidual, Kind, LoopFacts, NoReverseMode, Plan


@dataclass(frozen=True)
class Lax(Kind):
    """The loop as `jax.lax` has it.

    Reverse mode works where it does in `jax.lax`, for a fixed number of steps, and stores what
    `jax.lax.scan` stores; elsewhere it is an error. Forward mode and `jax.vmap` work always.
    Body evaluations for forward and gradient: n. Bound: not needed.
    """

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`."""
        if loop.is_fixed:
            return EveryResidual()
        return NoReverseMode(
            ValueError,
            "reverse mode through a loop of kind `Lax()` whose number of steps is not fixed when it is traced. "
            "Choose a kind that has it: `Checkpointed()` (some carries), or, with a static bound such as `max_steps=`, "
            "`Bounded()` (every carry) or `Residuals()` (what `jax.lax.scan` stores).",
        )
