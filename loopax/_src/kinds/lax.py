"""`Lax`: the loop as `jax.lax` has it."""

from dataclasses import dataclass

from loopax._src.core import EveryResidual, Kind, LoopFacts, NoReverseMode, Plan


@dataclass(frozen=True)
class Lax(Kind):
    """Differentiate the loop as `jax.lax` does.

    Reverse mode works if the number of steps is fixed when the loop is traced. A gradient then stores what
    `jax.lax.scan` stores, and forward and gradient together evaluate the body n times. If the number of steps is not
    fixed, reverse mode is an error. Forward mode and `jax.vmap` always work. The loop needs no bound.
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
