"""The three loops, saved to disk while they run, and resumed."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from loopax._src.core.finite import Finite
from loopax._src.core.lowering.rows import read
from loopax._src.durable.chunk import EPOCH, Job, RowPlan
from loopax._src.durable.options import DurableOptions, loop_options
from loopax._src.durable.run import run_job
from loopax._src.frontend import options as arguments
from loopax._src.frontend.extent import Limits
from loopax._src.frontend.steps import fori_step, scan_rows, scan_step, while_step
from loopax._src.jax_internals import api_boundary
from loopax._src.nnx.functional import freeze, refuse_changes, thaw_numbered
from loopax._src.pytrees.leaves import LoopInfo, pack
from loopax._src.pytrees.static import Called, an_int

# To type checkers, the result has the type that the body returns, as in `loopax.while_loop`.
C = TypeVar("C")

_EXTRAS = ("start", "key")  # what goes into the arguments of a step, besides its number


@overload
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[..., C],
    init_val: PyTree[Any],
    *,
    info: Literal[False] = False,
    **options: Unpack[DurableOptions],
) -> C: ...
@overload
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[..., C],
    init_val: PyTree[Any],
    *,
    info: Literal[True],
    **options: Unpack[DurableOptions],
) -> tuple[C, LoopInfo]: ...
@api_boundary
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[..., Any],
    init_val: PyTree[Any],
    *,
    directory: str | os.PathLike[str],
    max_steps: int | None = None,
    checkpoint_every: int | float | timedelta = 60.0,
    keep: int = 2,
    resume: str = "auto",
    chunk_steps: int | None = None,
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: Any = None,
    finite: Finite | None = None,
) -> Any:
    """`loopax.while_loop` for runs of hours: saves its state to disk, and the same call resumes the run.

    The meaning is that of `loopax.while_loop`. If `directory` holds saves of the same program, the call continues from
    the newest save. The result has the same bits as that of an uninterrupted run.

    Call it from Python, not inside `jit`, `vmap` or `grad`: the loop runs in compiled chunks of steps, and loopax can
    save the state between two chunks.

    Parameters
    ----------
    cond_fun, body_fun, init_val
        As in `loopax.while_loop`. All arrays in the carry are saved, also those in Equinox modules and NNX objects.
        Other leaves are part of the program.
    directory
        The directory for the saves of this run, and of no other run. loopax creates a directory that does not exist.
    max_steps
        A static bound on the number of steps, up to 2**63 - 1. A resumed run may have a larger bound. None: no bound.
    checkpoint_every
        The most work that may be lost if the process is killed: steps (an int) or seconds of running (a float, or a
        `timedelta`). The default is 60.0 seconds. A save begins somewhat earlier, so that it is complete in time. A
        single step that takes longer cannot be divided.
    keep
        The number of saves that are kept, at least 1. The default is 2. With 2 or more, the run can continue if one
        save is damaged.
    resume
        Which stored runs may continue:

        - `"auto"` (the default): a run of the same program. A stored run of another program is an error. If no run is
          stored, a new run starts.
        - `"anyway"`: also a run of another program or of another version of JAX or loopax, if the loop, its data (key,
          `xs`, numbers of rows) and the types of the carry are the same. A warning says what differs, and the
          directory keeps it.
    chunk_steps
        The steps in one compiled chunk. None: as many as take about 0.2 seconds. An interrupt waits for the end of a
        chunk. Results do not depend on it.
    key, throw, info, finite
        As in `loopax.while_loop`.
    progress
        Whether to show progress, as in `loopax.while_loop`. There is one bar for all chunks.

    Returns
    -------
    val
        As in `loopax.while_loop`. With `info`, `num_steps` is an int64 that counts the steps of all calls.

    Raises
    ------
    TypeError
        - As in `loopax.while_loop`.
        - The call is inside a transformation of JAX.
        - The dtype of a carried array cannot be saved.
    ValueError
        - As in `loopax.while_loop`.
        - `checkpoint_every` is not positive.
        - The directory holds a run of another program or of another version; the message says what differs.
    equinox.EquinoxRuntimeError
        As in `loopax.while_loop`.
    loopax.durable.SaveError
        Something could not be written. The last good save is unchanged.
    RuntimeError
        - Another process runs in the directory.
        - No save in the directory is complete and undamaged, including the rows of outputs that belong to it.
    KeyboardInterrupt, SystemExit
        Ctrl-C or SIGTERM arrived; the state is saved first. A second signal does not wait.

    Notes
    -----
    Cost: one compilation, a fraction of a millisecond per chunk, and for each save a copy of the carry, in memory and
    on disk.

    Steps are counted in 64 bits. With `key`, step i gets the key `fold_in(key, i)` for i up to 2147483647. Later steps
    get a key that is derived from `key` and the multiples of 2147483648.

    Several processes (`jax.distributed`) make the call together, with the same directory on a shared file system.

    There are no derivatives and no batches of durable loops, so there is no `kind` and no `lanes`. Loops in the body
    have both.

    """
    options = loop_options("durable.while_loop", (init_val,), key, progress, max_steps, throw, info, finite=finite)
    goes_on, call = while_step(options, cond_fun, body_fun)
    job = Job(
        options,
        "body_fun of durable.while_loop",
        Called(options.name, (body_fun, cond_fun), ("carry",), _EXTRAS),
        lambda row, extras, val, _: call(extras[0] + row, extras, val, None),
        lambda steps: np.int32(steps % EPOCH),
        init_val,
        options.max_steps,
        stops=True,
        condition=goes_on,
    )
    return run_job(job, directory, checkpoint_every, keep, resume, chunk_steps)


@overload
def fori_loop(
    lower: int,
    upper: int,
    body_fun: Callable[..., C],
    init_val: PyTree[Any],
    *,
    unroll: int | bool | None = None,
    info: Literal[False] = False,
    **options: Unpack[DurableOptions],
) -> C: ...
@overload
def fori_loop(
    lower: int,
    upper: int,
    body_fun: Callable[..., C],
    init_val: PyTree[Any],
    *,
    unroll: int | bool | None = None,
    info: Literal[True],
    **options: Unpack[DurableOptions],
) -> tuple[C, LoopInfo]: ...
@api_boundary
def fori_loop(
    lower: int,
    upper: int,
    body_fun: Callable[..., Any],
    init_val: PyTree[Any],
    *,
    directory: str | os.PathLike[str],
    max_steps: int | None = None,
    checkpoint_every: int | float | timedelta = 60.0,
    keep: int = 2,
    resume: str = "auto",
    chunk_steps: int | None = None,
    unroll: int | bool | None = None,
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: Any = None,
    finite: Finite | None = None,
) -> Any:
    """`loopax.fori_loop` for runs of hours: saves its state to disk, and the same call resumes the run.

    The meaning is that of `loopax.fori_loop`. Saving and resuming work as in `durable.while_loop`.

    Parameters
    ----------
    lower, upper
        The limits, as in `loopax.fori_loop`. There may be more than 2**31 steps, if the dtype of the index holds them.
        A resumed run may have a larger `upper` than before, and continues up to it.
    body_fun, init_val, max_steps, key, throw, info, finite
        As in `loopax.fori_loop`.
    directory, checkpoint_every, keep, resume, chunk_steps, progress
        As in `durable.while_loop`.
    unroll
        Steps per iteration of the compiled loop. Chunks consist of whole iterations. None: 1.

    Returns
    -------
    val
        As in `loopax.fori_loop`. With `info`, `num_steps` is an int64 that counts the steps of all calls.

    Raises
    ------
    TypeError
        As in `durable.while_loop`, or a limit is not an integer.
    ValueError
        As in `durable.while_loop`, or the index cannot hold a limit.
    RuntimeError, loopax.durable.SaveError, KeyboardInterrupt, SystemExit
        As in `durable.while_loop`.

    Notes
    -----
    Cost and derivatives: as in `durable.while_loop`.

    """
    options = loop_options(
        "durable.fori_loop", (lower, upper, init_val), key, progress, max_steps, throw, info, finite=finite
    )
    limits = Limits.of(lower, upper, options.name)
    length, (first, is_weak) = limits.known_distance(), limits.first_index()
    total = length if options.max_steps is None else min(length, options.max_steps)
    job = Job(
        options,
        "body_fun of durable.fori_loop",
        Called(options.name, (body_fun,), ("i", "carry"), _EXTRAS),
        fori_step(options, body_fun, is_weak),
        lambda steps: np.asarray(int(first) + steps, first.dtype),
        init_val,
        total,
        cut=total < length,
        unroll=arguments.unroll_steps(options.name, unroll, total, stops=False),
        settings={"lower": str(int(lower))},
    )
    return run_job(job, directory, checkpoint_every, keep, resume, chunk_steps)


@overload
def scan(
    f: Callable[..., tuple[C, Any]],
    init: PyTree[Any],
    xs: PyTree[Any] = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    stop: Callable[[Any, Any], Any] | None = None,
    info: Literal[False] = False,
    **options: Unpack[DurableOptions],
) -> tuple[C, Any]: ...
@overload
def scan(
    f: Callable[..., tuple[C, Any]],
    init: PyTree[Any],
    xs: PyTree[Any] = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    stop: Callable[[Any, Any], Any] | None = None,
    info: Literal[True],
    **options: Unpack[DurableOptions],
) -> tuple[tuple[C, Any], LoopInfo]: ...
@api_boundary
def scan(
    f: Callable[..., tuple[Any, Any]],
    init: PyTree[Any],
    xs: PyTree[Any] = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    directory: str | os.PathLike[str],
    max_steps: int | None = None,
    checkpoint_every: int | float | timedelta = 60.0,
    keep: int = 2,
    resume: str = "auto",
    chunk_steps: int | None = None,
    stop: Callable[[Any, Any], Any] | None = None,
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: Any = None,
    finite: Finite | None = None,
) -> Any:
    """`loopax.scan` for runs of hours: saves its state to disk, and the same call resumes the run.

    The meaning is that of `loopax.scan`. Saving and resuming work as in `durable.while_loop`. Rows of `ys` are written
    to disk while the loop runs, so `ys` may be larger than memory. `durable.outputs(directory)` reads them during the
    run.

    Parameters
    ----------
    f, init, xs, reverse, stop, max_steps, key, throw, info, finite
        As in `loopax.scan`.
    length
        The number of rows to scan, as in `loopax.scan`. If `xs` has no arrays, a resumed run may have a larger `length`
        than before.
    unroll
        As in `durable.fori_loop`.
    directory, checkpoint_every, keep, resume, chunk_steps, progress
        As in `durable.while_loop`.

    Returns
    -------
    carry
        As in `loopax.scan`.
    ys
        A pytree of `durable.Rows`: arrays on disk. An index (`ys[1000:2000]`) reads only these rows; `np.asarray(ys)`
        reads all rows. Each read compares the checksums of the pieces that it reads.

    Raises
    ------
    TypeError, ValueError, RuntimeError, loopax.durable.SaveError, KeyboardInterrupt, SystemExit
        As in `durable.while_loop` and `loopax.scan`.

    Notes
    -----
    Cost and derivatives: as in `durable.while_loop`.

    Memory: at most some 32 MiB of rows that a chunk writes, and as many that wait to be written to disk.

    Arrays on disk have the format of Zarr (version 3). There is one in `directory/outputs/` for each leaf.

    """
    words = arguments.Words("durable.scan", "f", "xs", "ys")
    options = loop_options(words.name, (init, xs, length), key, progress, max_steps, throw, info, finite=finite)
    length = None if length is None else an_int(f"{words.name}(length=...)", length)
    extent = scan_rows(words, options, f, stop, xs, length, reverse)
    low, high = int(extent.low), int(extent.high)
    total = None if extent.capacity is None and length is None else high - low
    first, direction = (high - 1, -1) if extent.reverse else (low, 1)
    rows = RowPlan(extent.capacity or 0, first, direction)
    call = scan_step(words, options, f, stop, has_rows=extent.capacity is not None)
    arrays, spec = pack(freeze(xs))
    row_spec = spec.rows()
    arrays = [x if len(x) else jnp.zeros((1, *x.shape[1:]), x.dtype) for x in arrays]  # the body is traced anyway

    def reading(row: Any, extras: Sequence[Any], carry: Any, _: Any) -> tuple[Any, Any, Any]:
        """A step that reads its row in the arrays: the row of a chunk's first step is among the extras."""
        place = extras[0] + rows.direction * row
        given = row_spec.unpack([read(x, place) for x in arrays])
        x, objects = thaw_numbered(given)
        results = call(place, extras, carry, x)
        if objects:
            refuse_changes(words.where, given, objects, x)
        return results

    job = Job(
        options,
        words.where,
        Called(words.name, (f,) if stop is None else (f, stop), ("carry", "x"), _EXTRAS),
        reading,
        lambda steps: np.int32(rows.of_step(steps)),
        init,
        total,
        cut=extent.over_limit is True,
        stops=stop is not None,
        unroll=arguments.unroll_steps(words.name, unroll, total, stop is not None),
        rows=rows,
        settings={"first row": str(first)} | ({"rows of xs": str(extent.capacity)} if arrays else {}),
        arrays={f"xs, array {i}": x for i, x in enumerate(arrays)},
    )
    return run_job(job, directory, checkpoint_every, keep, resume, chunk_steps)
