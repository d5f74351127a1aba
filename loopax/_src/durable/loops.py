"""The three loops, saved to disk while they run, and resumed."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from loopax._src.core.lowering.while_loop import read
from loopax._src.durable.job import Job, run_job, step_key_data
from loopax._src.durable.options import Durability, loop_options
from loopax._src.durable.row_plan import RowPlan
from loopax._src.durable.run import EPOCH
from loopax._src.frontend import options as arguments
from loopax._src.frontend.limits import Limits
from loopax._src.frontend.steps import Call, fori_step, scan_rows, scan_step, while_step
from loopax._src.function_names import Called
from loopax._src.nnx.functional import freeze, thaw_numbered
from loopax._src.nnx.writeback import refuse_changes
from loopax._src.pytrees.leaves import pack
from loopax._src.pytrees.static_args import an_int

_EXTRAS = ("start", "key")  # what goes into the arguments of a step, besides its number


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[..., Any],
    init_val: PyTree[Any],
    *,
    directory: str | os.PathLike[str],
    checkpoint_every: int | float | timedelta = 60.0,
    keep: int = 2,
    resume: str = "auto",
    chunk_steps: int | None = None,
    max_steps: int | None = None,
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: Any = None,
) -> Any:
    """`loopax.while_loop` for runs of hours: saved to disk while it runs, and resumed by the same call.

    The meaning is that of `loopax.while_loop`. It is called from Python, not inside of `jit`, `vmap` or `grad`: the
    loop runs in compiled chunks of steps, and between two of them its state can be saved. A call that finds saves of
    the same program in `directory` goes on from the newest one, and ends with the bits of a run that was never
    interrupted.

    Parameters
    ----------
    cond_fun, body_fun, init_val, key, throw, info
        As in `loopax.while_loop`. Every leaf of the carry that is an array is saved, also in Equinox modules and NNX
        objects; others are part of the program.
    directory
        Where this run is saved, and nothing else; made if it is not there.
    checkpoint_every
        The most work that a kill may lose: steps (an int) or seconds of running (a float, or a `timedelta`). Saves
        begin somewhat earlier, so that they are complete in time; a single step that takes longer cannot be divided.
    keep
        The number of saves that are kept, at least 1. With 2 or more, a damaged one does not lose the run.
    resume
        "auto": go on with the stored run if its program is the same; an error if its program is another; a new run if
        none is stored. "anyway": also go on from a state of another program, if the types of the carry are the same; a
        warning says what differs. A run also goes on under another version of JAX, if a step computes the same there.
    chunk_steps
        Steps of a compiled chunk. Default: as many as take about 0.2 seconds, which is how long an interrupt waits.
        Results do not depend on it.
    max_steps
        As in `loopax.while_loop`, up to 2**63 - 1. It may be larger when a run is resumed.
    progress
        As in `loopax.while_loop`; one bar for all chunks.

    Returns
    -------
    val
        As in `loopax.while_loop`; with `info`, `num_steps` is an int64 that counts all runs.

    Raises
    ------
    TypeError, ValueError, equinox.EquinoxRuntimeError
        As in `loopax.while_loop`; it is called inside of a transformation; the carry has leaves that cannot be saved;
        `checkpoint_every` is not positive; the directory holds a run of another program (what differs is shown).
    loopax.durable.SaveError
        Something could not be written. The last good save is as it was.
    RuntimeError
        Another process runs in the directory, or no save in it is whole (with the rows of outputs that belong to it).
    KeyboardInterrupt, SystemExit
        Ctrl-C or SIGTERM, after the state has been saved. A second one does not wait.

    Notes
    -----
    Cost: one compilation, a fraction of a millisecond per chunk, and for each save a copy of the carry, in memory and
    on disk. Steps are counted in 64 bits; with `key`, step i gets `fold_in(key, i)` up to 2147483647, and then a key of
    a stream that is derived from `key` and the multiples of 2147483648. Several processes (`jax.distributed`) call it
    together, with the same directory on a file system that they share. There are no derivatives and no batches of
    durable loops, so there is no `kind` and no `lanes`; loops in the body have both.

    """
    options = loop_options("durable.while_loop", (init_val,), key, progress, max_steps, throw, info)
    goes_on, call = while_step(options, cond_fun, body_fun)

    def start(steps: int) -> list[Any]:
        return [np.int32(steps % EPOCH), *step_key_data(options, steps)]

    job = Job(
        options,
        "body_fun of durable.while_loop",
        Called(options.name, (body_fun, cond_fun), ("carry",), _EXTRAS),
        lambda row, extras, val, _: call(extras[0] + row, extras, val, None),
        start,
        init_val,
        options.max_steps,
        stops=True,
        condition=goes_on,
    )
    carry, _, loop_info = run_job(job, Durability(directory, checkpoint_every, keep, resume, chunk_steps))
    return options.with_info(carry, loop_info)


def fori_loop(
    lower: int,
    upper: int,
    body_fun: Callable[..., Any],
    init_val: PyTree[Any],
    *,
    directory: str | os.PathLike[str],
    checkpoint_every: int | float | timedelta = 60.0,
    keep: int = 2,
    resume: str = "auto",
    chunk_steps: int | None = None,
    unroll: int | bool | None = None,
    max_steps: int | None = None,
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: Any = None,
) -> Any:
    """`loopax.fori_loop` for runs of hours: saved to disk while it runs, and resumed by the same call.

    The meaning is that of `loopax.fori_loop`; `durable.while_loop` says what durable means.

    Parameters
    ----------
    lower, upper, body_fun, init_val, max_steps, key, throw, info
        As in `loopax.fori_loop`. There may be more steps than fit into 32 bits, if the index fits into its dtype. A run
        that is resumed may have a larger `upper` than before, and goes on to it.
    unroll
        Steps per iteration of the compiled loop. Chunks are made of whole iterations.
    directory, checkpoint_every, keep, resume, chunk_steps, progress
        As in `durable.while_loop`.

    Returns
    -------
    val
        As in `loopax.fori_loop`; with `info`, `num_steps` is an int64 that counts all runs.

    Raises
    ------
    TypeError, ValueError, RuntimeError, loopax.durable.SaveError, KeyboardInterrupt, SystemExit
        As in `durable.while_loop`; limits that are not integers, or that the index cannot hold.

    Notes
    -----
    Cost and derivatives: as in `durable.while_loop`.

    """
    options = loop_options("durable.fori_loop", (lower, upper, init_val), key, progress, max_steps, throw, info)
    limits = Limits.of(lower, upper, options.name)
    length, (first, is_weak) = limits.known_distance(), limits.first_index()
    total = length if options.max_steps is None else min(length, options.max_steps)

    def start(steps: int) -> list[Any]:
        return [np.asarray(int(first) + steps, first.dtype), *step_key_data(options, steps)]

    job = Job(
        options,
        "body_fun of durable.fori_loop",
        Called(options.name, (body_fun,), ("i", "carry"), _EXTRAS),
        fori_step(options, body_fun, is_weak),
        start,
        init_val,
        total,
        cut=total < length,
        unroll=arguments.unroll_steps(options.name, unroll, total, stops=False),
        settings={"lower": str(int(lower))},
    )
    carry, _, loop_info = run_job(job, Durability(directory, checkpoint_every, keep, resume, chunk_steps))
    return options.with_info(carry, loop_info)


def scan(
    f: Callable[..., tuple[Any, Any]],
    init: PyTree[Any],
    xs: PyTree[Any] = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    directory: str | os.PathLike[str],
    checkpoint_every: int | float | timedelta = 60.0,
    keep: int = 2,
    resume: str = "auto",
    chunk_steps: int | None = None,
    stop: Callable[[Any, Any], Any] | None = None,
    max_steps: int | None = None,
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: Any = None,
) -> Any:
    """`loopax.scan` for runs of hours: saved to disk while it runs, and resumed by the same call.

    The meaning is that of `loopax.scan`; `durable.while_loop` says what durable means. Rows of `ys` go to disk as they
    come, so there may be more of them than memory holds, and `durable.outputs(directory)` reads them while the run
    goes on.

    Parameters
    ----------
    f, init, xs, length, reverse, stop, max_steps, key, throw, info
        As in `loopax.scan`. Without rows of `xs`, a run that is resumed may have a larger `length` than before.
    unroll
        As in `durable.fori_loop`.
    directory, checkpoint_every, keep, resume, chunk_steps, progress
        As in `durable.while_loop`.

    Returns
    -------
    carry
        As in `loopax.scan`.
    ys
        A pytree of `durable.Rows`: arrays on disk, of which is read what is indexed (`ys[1000:2000]`,
        `np.asarray(ys)`), and compared with the checksums that were written with it.

    Raises
    ------
    TypeError, ValueError, RuntimeError, loopax.durable.SaveError, KeyboardInterrupt, SystemExit
        As in `durable.while_loop` and `loopax.scan`.

    Notes
    -----
    Cost and derivatives: as in `durable.while_loop`. In memory are at most some 32 MiB of rows that a chunk writes, and
    as many that wait to be on disk. Arrays on disk have Zarr's format (version 2), one in `directory/outputs/` for each
    leaf.

    """
    words = arguments.Words("durable.scan", "f", "xs", "ys")
    options = loop_options(words.name, (init, xs, length), key, progress, max_steps, throw, info)
    length = None if length is None else an_int(f"{words.name}(length=...)", length)
    extent, reverse = scan_rows(words, options, f, stop, xs, length, reverse)
    low, high = int(extent.low), int(extent.high)
    total = None if extent.capacity is None and length is None else high - low
    rows = RowPlan(extent.capacity or 0, high - 1 if reverse else low, reverse)
    call = scan_step(words, options, f, stop, has_rows=extent.capacity is not None)
    arrays, call = _reading(words, xs, rows, call)

    def start(steps: int) -> list[Any]:
        return [np.int32(rows.of_step(steps)), *step_key_data(options, 0)]

    job = Job(
        options,
        words.where,
        Called(words.name, (f,) if stop is None else (f, stop), ("carry", "x"), _EXTRAS),
        call,
        start,
        init,
        total,
        cut=extent.over_limit is True,
        stops=stop is not None,
        unroll=arguments.unroll_steps(words.name, unroll, total, stop is not None),
        rows=rows,
        settings={"first row": str(rows.first)} | ({"rows of xs": str(extent.capacity)} if arrays else {}),
        arrays={f"xs, array {i}": x for i, x in enumerate(arrays)},
    )
    carry, ys, loop_info = run_job(job, Durability(directory, checkpoint_every, keep, resume, chunk_steps))
    return options.with_info((carry, ys), loop_info)


def _reading(words: arguments.Words, xs: Any, rows: RowPlan, call: Call) -> tuple[list[Any], Call]:
    """The arrays of xs, and a step that reads its row in them: the row of a chunk's first step is among the extras."""
    arrays, spec = pack(freeze(xs))
    row_spec = spec.rows()
    arrays = [x if len(x) else jnp.zeros((1, *x.shape[1:]), x.dtype) for x in arrays]  # the body is traced anyway

    def reading(row: Any, extras: Sequence[Any], carry: Any, _: Any) -> tuple[Any, Any, Any]:
        place = extras[0] + rows.direction * row
        given = row_spec.unpack([read(x, place) for x in arrays])
        x, objects = thaw_numbered(given)
        results = call(place, extras, carry, x)
        if objects:
            refuse_changes(words.where, given, objects, x)
        return results

    return arrays, reading
