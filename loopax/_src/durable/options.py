"""What makes a loop durable: its arguments, and the errors for what they may not be."""

from dataclasses import dataclass, replace
from datetime import timedelta
from os import PathLike
from typing import Any, NamedTuple, Required

from jax.core import Tracer
from jax.tree_util import tree_leaves

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.durable.directory import Directory, open_directory
from loopax._src.durable.pace import Every, checkpoint_every
from loopax._src.frontend.options import CommonOptions, Options, options
from loopax._src.jax_internals import is_tracing
from loopax._src.kinds import Lax
from loopax._src.lanes import Lockstep
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.static_args import an_int, int_within


class DurableOptions(CommonOptions, total=False):
    """The options of durable loops."""

    directory: Required[str | PathLike[str]]
    checkpoint_every: int | float | timedelta
    keep: int
    resume: str
    chunk_steps: int | None


class Durability(NamedTuple):
    """The arguments that make a loop durable, as given."""

    directory: Any
    checkpoint_every: Any
    keep: Any
    resume: Any
    chunk_steps: Any


@dataclass(frozen=True)
class Checked:
    """Options after the check, as the classes that use them."""

    directory: Directory
    every: Every
    keep: int
    anyway: bool
    chunk_steps: int | None


def check(name: str, given: Durability) -> Checked:
    """Understand them."""
    every = checkpoint_every(name, given.checkpoint_every)
    keep = an_int(f"{name}(keep=...)", given.keep, ", the number of saves")
    if keep < 1:
        raise ValueError(f"{name}(keep=...): got {keep}, expected at least 1, the number of saves that are kept.")
    if given.resume not in ("auto", "anyway"):
        raise ValueError(f"{name}(resume=...): got {given.resume!r}, expected 'auto' or 'anyway'.")
    steps = given.chunk_steps
    if steps is not None:
        steps = int_within(f"{name}(chunk_steps=...)", steps, 1, MOST_STEPS, ", the steps of a compiled chunk")
    return Checked(open_directory(name, given.directory), every, keep, given.resume == "anyway", steps)


def loop_options(
    name: str, given: tuple[Any, ...], key: Any, progress: ProgressLike, max_steps: Any, throw: Any, info: Any
) -> Options:
    """The options that all loops share, with a bound of 64 bits; `given`: the other arguments that hold arrays.

    A durable loop is neither differentiated nor batched, so its callers have no say in how.
    """
    refuse_transformations(name, given, key)
    shared = options(name, Lax(), Lockstep(), key, progress, None, throw, info)
    if max_steps is None:
        return shared
    return replace(shared, max_steps=int_within(f"{name}(max_steps=...)", max_steps, 0, 2**63 - 1))


def refuse_transformations(name: str, *given: Any) -> None:
    """Refuse to run inside of a transformation, or with values that one has left behind."""
    if is_tracing() or any(isinstance(leaf, Tracer) for leaf in tree_leaves(given)):
        raise TypeError(
            f"{name} saves to disk while it runs, so Python calls it, and it cannot be called inside of `jax.jit`, "
            f"`vmap`, `grad` or another transformation. Call it outside of them, or call `loopax.{name.split('.')[1]}` "
            "here, which can be transformed."
        )
