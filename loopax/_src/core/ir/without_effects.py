"""Programs without effects: recomputed steps do not repeat these."""

from loopax._src.core.ir.strip_progress import strip_progress
from loopax._src.core.jaxpr.silent import silent
from loopax._src.jax_internals import ClosedJaxpr


def without_effects(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop effectful equations without results (debug prints) and progress: recomputed steps do not repeat these."""
    return silent(strip_progress(closed))
