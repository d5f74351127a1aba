"""Effects of equations."""

from collections.abc import Iterable
from typing import Any

from jax._src import core as _core
from jax._src import effects as _effects
from jax.extend.core import ClosedJaxpr


def happens(effects: Iterable[Any]) -> bool:
    """Whether there are effects but those that only say over which axis something communicates."""
    return any(not isinstance(e, _core.NamedAxisEffect) for e in effects)


def are_ordered(effects: Iterable[Any]) -> bool:
    """Whether one of these effects has an order."""
    return any(map(_effects.ordered_effects.contains, effects))


def undifferentiable_effects(closed: ClosedJaxpr) -> list[Any]:
    """Effects that a derivative may neither drop nor repeat: ordered ones, and `io_callback`'s."""
    return [
        e
        for e in closed.effects
        if _effects.ordered_effects.contains(e) or type(e).__name__ in ("IOEffect", "OrderedIOEffect")
    ]
