"""`Auto`: the fastest of the other kinds that fits in so much memory."""

from dataclasses import dataclass

from loopax._src import core
from loopax._src.kinds.base import Kind
from loopax._src.pytrees.static_args import Why, positive_int

DEFAULT_MEMORY = 256 * 2**20
_MEMORY = Why(
    "what a gradient stores", "give the most bytes that a gradient may take: one budget serves every number of steps"
)


@dataclass(frozen=True)
class Auto(Kind):
    """The default: the fastest of the other kinds that fits in so much memory.

    The choice is made where a gradient is taken, from the bound, the types in the carry, what the derivative
    of a step needs, and an estimate of what a step costs. It takes `Residuals()`, `Bounded()` or
    `Checkpointed()`, the last with as many checkpoints as fit; without a bound, `Checkpointed()` with up to
    64. Where the bound is `max_steps` and the length known only at run time, it may be far above the
    steps that are taken: then `Residuals()` and `Bounded()`, which need room for all of them, get an
    eighth of the memory. Only shapes that are visible there count: a `jax.vmap` outside of the
    gradient multiplies them.

    Where no gradient is taken, this is `Lax()`.

    Parameters
    ----------
    memory
        Bytes that the gradient of one loop may store: 256 MiB unless given. Never read from the device.

    Raises
    ------
    TypeError
        `memory` is not an int, or is traced.
    ValueError
        `memory` is less than 1; or, where a gradient is taken, less than one carry (the message says how
        much that is).

    """

    memory: int = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        """Refuse what is not a number of bytes."""
        object.__setattr__(self, "memory", positive_int("Auto(memory=...)", self.memory, "bytes", _MEMORY))

    def storage(self, bound: int | None, fixed: bool, bound_is_loose: bool) -> core.Storage:
        """See `Kind.storage`."""
        del bound, fixed
        return core.Fastest(self.memory, bound_is_loose)
