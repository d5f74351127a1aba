"""What makes a loop durable: its arguments, and the errors for what they may not be."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Required

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import tree_leaves

from loopax._src.core.ir.lanes import Lockstep
from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.durable.pace import SavePace, checkpoint_every
from loopax._src.extras import optional
from loopax._src.frontend.options import CommonOptions, Options, options
from loopax._src.jax_internals import is_tracing
from loopax._src.kinds import Lax
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.static import an_int, int_within

# Decisions of several processes that run a loop together (`jax.distributed`); one process decides alone.


def agreed(signal: int, *numbers: int) -> list[int]:
    """What all processes go by: the signal that any of them has received, and what else the first one says."""
    if jax.process_count() == 1:
        return [signal, *numbers]
    from jax.experimental import multihost_utils

    everyone = multihost_utils.process_allgather(np.array([signal, *numbers], np.int32))
    return [int(everyone[:, 0].max()), *(int(number) for number in everyone[0, 1:])]


def all_agree(flag: bool) -> bool:
    """What the first process says."""
    return bool(agreed(0, int(flag))[1])


def of_first(seconds: float) -> float:
    """What the first process has measured, to single precision: what all of them choose by must be the same."""
    bits = int(np.array([seconds], np.float32).view(np.int32)[0])
    return float(np.array(agreed(0, bits)[1:], np.int32).view(np.float32)[0])


def on_first(action: Callable[[], Any]) -> None:
    """Do something in the first process while the others wait; an error there is one in all of them."""
    error = None
    if jax.process_index() == 0:
        try:
            action()
        except Exception as found:  # noqa: BLE001, it is raised below
            error = found
    failed = all_agree(error is not None)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("the first process of this run has stopped with an error; see what it says.")


# The directory of a durable run. In it are:
# - `lock`, held by the process that runs;
# - `program.json`, what is run: versions, types, checksums;
# - `saves`, a directory for each save, which Orbax writes;
# - `outputs`, an array in Zarr's format for each leaf of a scan's outputs.
# In that of a gradient, `saves` are in `ahead` (where the forward pass is), `back` (where the way back is) and `states`
# (before chunks), `outputs` are the gradients of the rows of xs, and `plan.json` says how the run is divided.


def whole_path(where: str, path: Any) -> Path:
    """From the root of the file system on; an error where a link on the way leads nowhere."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{where}(directory=...): got {path!r}, expected a path (a str or a pathlib.Path).")
    whole = Path(path).expanduser().absolute()
    for one in [*reversed(whole.parents), whole]:
        if one.is_symlink() and not one.exists():
            raise FileNotFoundError(
                errno.ENOENT,
                f"{where}(directory=...) leads through a link to {os.readlink(one)}, which is not there. Make that "
                "directory (a disk may not be mounted), or remove the link",
                str(one),
            )
    if whole.anchor.replace("\\", "/").startswith("//"):
        raise ValueError(
            f"{where}(directory=...): got {str(path)!r}, and TensorStore, which writes the files, takes no path that "
            "begins with two slashes. Give a directory on a drive; on Windows, a share can have a letter (`net use`)."
        )
    return whole


# Orbax, and TensorStore on which it depends: imported when the first durable loop runs.
ocp = partial(optional, "orbax.checkpoint", "durable", "loopax.durable")
tensorstore = partial(optional, "tensorstore", "durable", "loopax.durable")


class SaveError(OSError):
    """A state or outputs could not be written. The run has stopped, and its last good save is unchanged."""


@contextmanager
def clear_errors(what: str, good: Callable[[], str]) -> Iterator[None]:
    """Say what failed and which save is good, where something cannot be written."""
    try:
        yield
    except Exception as error:
        raise SaveError(
            f"{what} failed ({type(error).__name__}: {error}). {good()}. Make room or mend the file system, and call "
            "again to go on from there."
        ) from error


class DamagedSaveWarning(UserWarning):
    """A save, or outputs that belong to it, are damaged. The run continues from an earlier save."""


class AnotherProgramWarning(UserWarning):
    """A run continues with another program, or under another version of JAX or loopax (`resume="anyway"`)."""


class DurableOptions(CommonOptions, total=False):
    """The options of durable loops."""

    directory: Required[str | PathLike[str]]
    checkpoint_every: int | float | timedelta
    keep: int
    resume: str
    chunk_steps: int | None


def check(
    name: str, directory: Any, every: Any, keep: Any, resume: Any, chunk_steps: Any = None, unroll: int = 1
) -> tuple[Path, SavePace, int, bool]:
    """The directory, when to save, how many saves to keep, and whether to resume another program.

    The directory is made last, if it is not there; an error where it cannot be written to.
    """
    every, in_steps = checkpoint_every(name, every)
    keep = an_int(f"{name}(keep=...)", keep, ", the number of saves")
    if keep < 1:
        raise ValueError(f"{name}(keep=...): got {keep}, expected at least 1, the number of saves that are kept.")
    if resume not in ("auto", "anyway"):
        raise ValueError(f"{name}(resume=...): got {resume!r}, expected 'auto' or 'anyway'.")
    if chunk_steps is not None:
        what = ", the steps of a compiled chunk"
        chunk_steps = int_within(f"{name}(chunk_steps=...)", chunk_steps, 1, MOST_STEPS, what)
    root = whole_path(name, directory)
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{name}(directory=...) cannot be written to: {error.strerror}. Give a directory in which this process may "
            "make files",
            str(root),
        ) from error
    return root, SavePace(every, in_steps, chunk_steps, unroll), keep, resume == "anyway"


def loop_options(
    name: str, given: tuple[Any, ...], key: Any, progress: ProgressLike, max_steps: Any, *rest: Any, finite: Any
) -> Options:
    """The options that all loops share, with a bound of 64 bits; `given`: the other arguments that hold arrays.

    A durable loop is neither differentiated nor batched, so its callers have no say in how. `rest`: throw and info.
    """
    refuse_transformations(name, given, key)
    shared = options(name, Lax(), Lockstep(), key, progress, None, *rest, finite=finite)
    if max_steps is None:
        return shared
    return replace(shared, max_steps=int_within(f"{name}(max_steps=...)", max_steps, 0, 2**63 - 1))


def refuse_transformations(name: str, *given: Any, instead: str | None = None) -> None:
    """Refuse to run inside of a transformation, or with values that one has left behind."""
    instead = instead or f"`loopax.{name.split('.')[1]}`"
    if is_tracing() or any(isinstance(leaf, Tracer) for leaf in tree_leaves(given)):
        raise TypeError(
            f"{name} saves to disk while it runs, so Python calls it, and it cannot be called inside of `jax.jit`, "
            f"`vmap`, `grad` or another transformation. Call it outside of them, or call {instead} "
            "here, which can be transformed."
        )
