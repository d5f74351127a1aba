"""Loops for JAX whose number of steps is known only at run time: differentiable in every mode, safe in every batch."""

# ruff: noqa: F405 - to type checkers, all names come from a star

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from loopax._version import __version__ as __version__

__all__ = [
    "Auto",
    "AutoLanes",
    "Bounded",
    "Buffer",
    "Checkpointed",
    "Compact",
    "Comparison",
    "Derivative",
    "Explanation",
    "Free",
    "History",
    "Implicit",
    "Kind",
    "LaneReport",
    "Lanes",
    "LanesStream",
    "Lax",
    "Lockstep",
    "LoopInfo",
    "Progress",
    "Residuals",
    "Reversible",
    "Rollout",
    "Sequential",
    "StreamInfo",
    "StreamReport",
    "SuspendedStream",
    "Truncated",
    "compare",
    "cond",
    "configure",
    "durable",
    "explain",
    "fori_loop",
    "lane_report",
    "lanes_map",
    "lanes_stream",
    "local",
    "rewrite_loops",
    "rollout",
    "scan",
    "sharded_lanes",
    "stochtrace",
    "switch",
    "while_loop",
]

if TYPE_CHECKING:
    from loopax._src.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import all that is public when the first of it is used: `python -m loopax --help` does without it."""
        if name in __all__:
            public = import_module("loopax._src.public")
            globals().update({each: getattr(public, each) for each in __all__})
            return globals()[name]
        if not name.startswith("_") and find_spec(f"loopax.{name}"):
            return import_module(f"loopax.{name}")  # `loopax.schedule`, say
        raise AttributeError(f"module 'loopax' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """The public names, also before the first of them is used."""
        return sorted({*globals(), *__all__})
