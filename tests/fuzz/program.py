"""What a random program is: plain data, so that one that fails can be kept as it is printed."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax

import loopax as lx

ROWS = 4  # of xs; the most steps of any loop


@dataclass(frozen=True)
class Program:
    """A loop, and what is asked of it."""

    loop: str  # scan, fori, while
    body: tuple[str, ...]  # names of operations (`catalogue.py`), one after another
    features: str = ""  # a letter each: leaves of the carry beside v, s and n, effects, and more (`catalogue.py`)
    steps: int | None = None  # a static number of them; None: an argument
    reverse: bool = False
    unroll: int = 1
    stop: bool = False  # after a step whose result is large
    max_steps: int | None = None
    kind: str = "auto"  # a name in `KINDS`
    lanes: str = "lockstep"  # a name in `LANES`
    policy: str = ""  # a name in `POLICIES`: `jax.checkpoint` around each step
    rewritten: bool = False  # written with the loops and branches of `jax.lax`, and rewritten by `lx.rewrite_loops`
    transformations: tuple[str, ...] = ()  # names in `transformations.py`, the innermost first
    seed: int = 0  # of the numbers
    finite: str = ""  # looked at each step: "watched", or with a "nan" or an "inf" that a step makes (`breaks`)


BROKEN = {"nan": float("nan"), "inf": float("-inf")}
KINDS: dict[str, Any] = {  # or a derivative, and the kind of its steps
    "auto": "auto",
    "checkpointed": "checkpointed",
    "two slots": lx.Checkpointed(2),
    "little memory": lx.Auto(memory=4096),
    "bounded": "bounded",
    "residuals": "residuals",
    "lax": "lax",
    # What a Python loop has where values of earlier steps are constants (`Unrolled`).
    "last two": (lx.Truncated(last=2), "checkpointed"),
    "windows of two": (lx.Truncated(window=2), "auto"),
}
LANES: dict[str, Any] = {
    "lockstep": "lockstep",
    "compact": lx.Compact(min_lanes=1, shrink=2),
    "free": "free",
    "sequential": "sequential",
    "auto": "auto",
}
KEPT_NAME, OFFLOADED_NAME = "kept", "offloaded"  # that operations give by `checkpoint_name`
_policies = jax.checkpoint_policies
POLICIES: dict[str, Any] = {
    "everything again": jax.checkpoint,
    "equinox": eqx.filter_checkpoint,
    "dots": lambda f: jax.checkpoint(f, policy=_policies.dots_saveable),
    "a name": lambda f: jax.checkpoint(f, policy=_policies.save_only_these_names(KEPT_NAME)),
    "offload": lambda f: jax.checkpoint(
        f,
        policy=_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[KEPT_NAME],
            names_which_can_be_offloaded=[OFFLOADED_NAME],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}
