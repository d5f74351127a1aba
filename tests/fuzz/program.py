"""What a random program is: plain data, so that one that fails can be kept as it is printed."""

from dataclasses import dataclass
from typing import Any

import loopax as lx

ROWS = 4  # of xs; the most steps of any loop


@dataclass(frozen=True)
class Program:
    """A loop, and what is asked of it."""

    loop: str  # scan, fori, while
    body: tuple[str, ...]  # names of operations (`operations.py`), one after another
    leaves: str = ""  # leaves of the carry beside v, s and n: z complex, f float32, and more (`operations.py`)
    steps: int | None = None  # a static number of them; None: an argument
    reverse: bool = False
    unroll: int = 1
    stop: bool = False  # after a step whose result is large
    max_steps: int | None = None
    kind: str = "auto"  # a name in `KINDS`
    lanes: str = "lockstep"  # a name in `LANES`
    transformations: tuple[str, ...] = ()  # names in `transformations.py`, the innermost first
    seed: int = 0  # of the numbers


KINDS: dict[str, Any] = {
    "auto": "auto",
    "checkpointed": "checkpointed",
    "two slots": lx.Checkpointed(2),
    "little memory": lx.Auto(memory=4096),
    "bounded": "bounded",
    "residuals": "residuals",
    "lax": "lax",
}
LANES: dict[str, Any] = {"lockstep": "lockstep", "compact": lx.Compact(min_lanes=1, shrink=2), "free": "free"}
