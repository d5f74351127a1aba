"""The three loops, saved to disk while they run, and resumed."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from loopax._src.core.lowering.while_loop import read
from loopax._src.durable.job import Job, run_job, step_key_data
from loopax._src.durable.options import Durability, max_steps_of, refuse_transformations
from loopax._src.durable.row_plan import RowPlan
from loopax._src.durable.run import EPOCH
from loopax._src.frontend import options as arguments
from loopax._src.frontend.extent import scan_extent
from loopax._src.frontend.limits import Limits, known_int
from loopax._src.function_names import Called
from loopax._src.jax_internals import to_weak
from loopax._src.kinds import Lax
from loopax._src.lanes import Lockstep
from loopax._src.nnx.functional import freeze, thaw_numbered
from loopax._src.nnx.writeback import refuse_changes
from loopax._src.pytrees.leaves import pack

# A durable loop is neither differentiated nor batched, so its callers have no say in how.
_KIND, _LANES = Lax(), Lockstep()

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
    refuse_transformations("durable.while_loop", init_val, key)
    options = arguments.options("durable.while_loop", _KIND, _LANES, key, progress, None, throw, info)
    arguments.check_callable("cond_fun of durable.while_loop", cond_fun)
    arguments.check_callable("body_fun of durable.while_loop", body_fun)
    total = max_steps_of(options.name, max_steps)

    def goes_on(val: Any) -> Any:
        return arguments.one_bool("cond_fun of durable.while_loop", cond_fun(val))

    def call(row: Any, extras: Any, val: Any, _: Any) -> tuple[Any, Any, Any]:
        val = body_fun(val, **options.step_key(extras[0] + row, extras))
        return val, None, goes_on(val)

    def start(steps: int) -> list[Any]:
        return [np.int32(steps % EPOCH), *step_key_data(options, steps)]

    where = "body_fun of durable.while_loop"
    called = Called(options.name, (body_fun, cond_fun), ("carry",), _EXTRAS)
    job = Job(options, where, called, call, start, init_val, total, stops=True, condition=goes_on)
    durability = Durability(directory, checkpoint_every, keep, resume, chunk_steps)
    carry, _, loop_info = run_job(job, durability)
    return (carry, loop_info) if options.info else carry


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
    refuse_transformations("durable.fori_loop", lower, upper, init_val, key)
    options = arguments.options("durable.fori_loop", _KIND, _LANES, key, progress, None, throw, info)
    arguments.check_callable("body_fun of durable.fori_loop", body_fun)
    first, is_weak = _first_index(lower, upper)
    length = max(int(upper) - int(lower), 0)
    most = max_steps_of(options.name, max_steps)
    total = length if most is None else min(length, most)

    def call(row: Any, extras: Any, val: Any, _: Any) -> tuple[Any, Any, Any]:
        i = extras[0] + row.astype(extras[0].dtype)
        i = to_weak(i) if is_weak else i
        return body_fun(i, val, **options.step_key(i, extras)), None, None

    def start(steps: int) -> list[Any]:
        return [np.asarray(int(lower) + steps, first.dtype), *step_key_data(options, steps)]

    job = Job(
        options,
        "body_fun of durable.fori_loop",
        Called(options.name, (body_fun,), ("i", "carry"), _EXTRAS),
        call,
        start,
        init_val,
        total,
        cut=total < length,
        unroll=arguments.unroll_steps(options.name, unroll, total, stops=False),
        settings={"lower": str(int(lower))},
    )
    durability = Durability(directory, checkpoint_every, keep, resume, chunk_steps)
    carry, _, loop_info = run_job(job, durability)
    return (carry, loop_info) if options.info else carry


def _first_index(lower: Any, upper: Any) -> tuple[Any, bool]:
    """The first index as an array, and whether it is weakly typed; an error where the index cannot hold the limits."""
    limits = Limits.of(lower, upper, "durable.fori_loop")
    wide = jnp.iinfo(jnp.asarray(0).dtype if _are_python(lower, upper) else jnp.result_type(lower, upper))
    for name, value in (("lower", lower), ("upper", upper)):
        if not wide.min <= int(value) <= wide.max:
            raise ValueError(
                f"durable.fori_loop({name}=...): got {int(value)}, which an index of dtype {wide.dtype} cannot hold. "
                "Enable 64-bit types, `jax.config.update('jax_enable_x64', True)`, or use `durable.while_loop`, whose "
                "steps have no index."
            )
    return limits.first_index()


def _are_python(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)


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
    refuse_transformations(words.name, init, xs, length, key)
    options = arguments.options(words.name, _KIND, _LANES, key, progress, None, throw, info)
    arguments.check_callable(words.where, f)
    if stop is not None:
        arguments.check_callable("stop of durable.scan", stop)
    reverse = arguments.is_reverse(words.name, reverse)
    most = max_steps_of(words.name, max_steps)
    extent = scan_extent(
        words, known_int(length), arguments.rows_of(words, freeze(xs)), most, reverse, stop is not None, options.throw
    )
    low, high = int(extent.low), int(extent.high)
    x_arrays, x_spec = pack(freeze(xs))
    x_rows = x_spec.rows()
    x_arrays = [x if len(x) else jnp.zeros((1, *x.shape[1:]), x.dtype) for x in x_arrays]  # the body is traced anyway
    first, direction = (high - 1, -1) if reverse else (low, 1)

    def call(row: Any, extras: Any, carry: Any, _: Any) -> tuple[Any, Any, Any]:
        place = extras[0] + direction * row
        given = x_rows.unpack([read(x, place) for x in x_arrays])
        x, objects = thaw_numbered(given)
        carry, y = arguments.pair(words, f(carry, x, **options.step_key(place, extras)))
        if objects:
            refuse_changes(words.where, given, objects, x)
        if extent.capacity is None:
            arguments.no_rows(words, freeze(y))
        on = None if stop is None else ~arguments.one_bool("stop of durable.scan", stop(carry, y))
        return carry, y, on

    def start(steps: int) -> list[Any]:
        return [np.int32(first + direction * steps), *step_key_data(options, 0)]

    total = None if extent.capacity is None and length is None else high - low
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
        rows=RowPlan(extent.capacity or 0, first, reverse),
        settings={"first row": str(first)} | ({"rows of xs": str(extent.capacity)} if x_arrays else {}),
        arrays={f"xs, array {i}": x for i, x in enumerate(x_arrays)},
    )
    carry, ys, loop_info = run_job(job, Durability(directory, checkpoint_every, keep, resume, chunk_steps))
    return ((carry, ys), loop_info) if options.info else (carry, ys)
