"""The three loops."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Int, PyTree

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.frontend import options as arguments
from loopax._src.frontend import trace as tracing
from loopax._src.frontend.extent import Extent, fori_extent, while_extent
from loopax._src.frontend.limits import Limits
from loopax._src.frontend.references import NO_REFERENCES, ReferenceRows, take_references
from loopax._src.frontend.run import Finished, LoopSpec, run
from loopax._src.frontend.runtime_checks import Check, settle
from loopax._src.frontend.steps import (
    always,
    fori_index,
    fori_step,
    functions_of_step,
    scan_rows,
    scan_step,
    step_back,
    while_step,
    within_length,
)
from loopax._src.function_names import Called
from loopax._src.kinds import KindLike
from loopax._src.lanes import LanesLike
from loopax._src.nnx.functional import thaw
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.types import LoopInfo


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[..., Any],
    init_val: PyTree[Any],
    *,
    max_steps: int | None = None,
    kind: KindLike = "auto",
    lanes: LanesLike = "lockstep",
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: ProgressLike = None,
) -> Any:
    """Repeat a body while a condition holds, with derivatives in every mode.

    The meaning, `max_steps` aside::

        val = init_val
        while cond_fun(val):
            val = body_fun(val)
        return val

    Parameters
    ----------
    cond_fun
        `cond_fun(val)` is one bool: whether to take another step.
    body_fun
        `body_fun(val)` is the next carry: a pytree of the same structure, shapes and dtypes. With `key`
        it is called as `body_fun(val, key=...)`.
    init_val
        The first carry: any pytree. Leaves that are not arrays (functions, strings, Python bools,
        Python numbers in Equinox modules) stay what they are. Leaves that the body returns unchanged cost nothing.
    max_steps
        A static bound on the number of steps. Reverse mode works without one, but can be faster with it.
    kind
        What a gradient stores: `Auto()`, `Lax()`, `Checkpointed()`, `Bounded()` or `Residuals()`, or
        the lower-case name of one; `Reversible(inverse)`. Or another derivative: `Implicit()`, `Truncated(last=k)`.
    lanes
        How a batch of loops under `jax.vmap` runs: `Lockstep()`, until the slowest lane is done; `Compact()`,
        without the lanes that have finished; `Sequential()`, one lane after another; `"auto"`, the fastest of
        these by an estimate; `Free()`, for a loop with a loop in its body, every lane on its own; or the lower-case
        name of one. Nothing comes from finished lanes.
    key
        A PRNG key. Step i gets `jax.random.fold_in(key, i)`, the same when a step is replayed.
    throw
        Whether a loop that `max_steps` stops raises (after the outermost loop, when the program runs).
    info
        Whether to return `(result, LoopInfo(num_steps, limit_reached))`.
    progress
        Whether to show how far the loop is while it runs: True, or a `Progress(...)` with a label and the like. Under
        `jax.vmap` there is one bar for the batch, a gradient shows the forward pass only (docs/progress.md).

    Returns
    -------
    val
        The carry when `cond_fun` is False, or after `max_steps` steps.

    Raises
    ------
    TypeError
        The carry changes its structure, shapes or dtypes; `cond_fun` does not return one bool;
        `max_steps` is not an int, `throw` or `info` not a bool, or one of them is traced
        (docs/static-and-dynamic.md).
    ValueError
        An unknown `kind` or `lanes`; a negative `max_steps`; `Bounded()` or `Residuals()` without a
        bound; reverse mode through `Lax()`.
    equinox.EquinoxRuntimeError
        `max_steps` stops a loop that would go on, and `throw` is True.

    Notes
    -----
    Cost: `cond_fun` n + 1 times, `body_fun` n times; for forward and gradient together, and for what is
    stored, see the `kind` (docs/kinds.md has a table). With the default and no bound, 64 carries are
    stored, and the body is evaluated at most 3n times up to 2187 steps, 4n up to 35594. Derivatives: all,
    in every order; reverse mode up to 2147483646 steps, and NaN beyond. Sources: Griewank & Walther
    (2000), Stumm & Walther (2010), see docs/references.md.

    """
    options = arguments.options("while_loop", kind, lanes, key, progress, max_steps, throw, info)
    goes_on, call = while_step(options, cond_fun, body_fun)
    functions = body_fun, cond_fun
    called = Called("while_loop", functions, ("carry",))
    spec, keys = ("while_loop", options.key_spec), functions_of_step(options, *functions)
    step = tracing.Step(call, "body_fun of while_loop", keys, spec, called, step_back(options))
    extent = while_extent(options.max_steps)
    done = run(step, _loop_spec(options, extent, body_fun), options.extras, init_val, None, goes_on)
    carry, _, loop_info = _finish(options, extent, done)
    return options.with_info(carry, loop_info)


def fori_loop(
    lower: int | Int[Array, ""],
    upper: int | Int[Array, ""],
    body_fun: Callable[..., Any],
    init_val: PyTree[Any],
    *,
    unroll: int | bool | None = None,
    max_steps: int | None = None,
    kind: KindLike = "auto",
    lanes: LanesLike = "lockstep",
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: ProgressLike = None,
) -> Any:
    """Repeat a body for a range of integers that may be known only at run time.

    The meaning, `max_steps` aside::

        val = init_val
        for i in range(lower, upper):
            val = body_fun(i, val)
        return val

    Parameters
    ----------
    lower, upper
        Integers, static or traced, which may differ between lanes under `jax.vmap`. Both have to fit the index, which
        has the dtype of the traced one.
    body_fun
        `body_fun(i, val)` is the next carry, of the same structure, shapes and dtypes. With `key` it is
        called as `body_fun(i, val, key=...)`.
    init_val
        The first carry, as in `while_loop`.
    unroll
        Steps per iteration of the compiled loop; a remainder is taken one by one. True or 0, where the
        number of steps is static: all of them.
    max_steps
        A static bound on the number of steps, with which reverse mode can be faster where a limit is traced.
    kind, lanes, key, throw, info, progress
        As in `while_loop`; step i gets the key `jax.random.fold_in(key, i)`.

    Returns
    -------
    val
        The carry after the last step.

    Raises
    ------
    TypeError
        As in `while_loop`; a limit or `unroll` is not an integer, or `unroll` is traced; int64 and uint64 limits.
    ValueError
        As in `while_loop`; `unroll=True` with a traced limit; a static limit that the index cannot hold; static limits
        further apart than `max_steps`, unless `throw` is False.
    equinox.EquinoxRuntimeError
        Traced limits are further apart than `max_steps`, and `throw` is True; or, before the first step, further
        apart than 2147483647, or beyond the dtype of the index.

    Notes
    -----
    Cost and derivatives: as in `while_loop`; static limits are a bound by themselves.

    """
    options = arguments.options("fori_loop", kind, lanes, key, progress, max_steps, throw, info)
    limits = Limits.of(lower, upper, "fori_loop")
    extent = fori_extent(limits, options.max_steps, options.throw)
    unroll = arguments.unroll_steps("fori_loop", unroll, extent.bound if extent.fixed else None, stops=False)
    first, is_weak = limits.first_index()
    call = fori_step(options, body_fun, is_weak)
    spec = ("fori_loop", is_weak, options.key_spec)
    called = Called("fori_loop", (body_fun,), ("i", "carry"), ("lower", "key"))
    back = step_back(options, partial(fori_index, is_weak=is_weak))
    keys = functions_of_step(options, body_fun)
    step = tracing.Step(call, "body_fun of fori_loop", keys, spec, called, back)
    loop_spec = _loop_spec(options, extent, body_fun, unroll=unroll)
    done = run(step, loop_spec, [first, *options.extras], init_val, None, None)
    carry, _, loop_info = _finish(options, extent, done)
    return options.with_info(carry, loop_info)


def scan(
    f: Callable[..., tuple[Any, Any]],
    init: PyTree[Any],
    xs: PyTree[Any] = None,
    length: int | Int[Array, ""] | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    stop: Callable[[Any, Any], Any] | None = None,
    max_steps: int | None = None,
    kind: KindLike = "auto",
    lanes: LanesLike = "lockstep",
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: ProgressLike = None,
) -> Any:
    """Scan over rows, as many as are known only at run time.

    The meaning, `max_steps` aside::

        carry, ys = init, zeros
        for i in range(length):                  # reversed(range(length)) if reverse
            carry, ys[i] = f(carry, xs[i])
            if stop is not None and stop(carry, ys[i]):
                break
        return carry, ys

    Parameters
    ----------
    f
        `f(carry, x)` is a pair: the next carry, and a row of outputs. With `key` it is called as
        `f(carry, x, key=...)`.
    init
        The first carry, as in `while_loop`.
    xs
        A pytree of arrays with the same number of rows, `(rows, ...)`. Other leaves go to `f` as they are.
    length
        The number of rows to scan, static or traced, at most the rows of `xs`; it may differ between
        lanes under `jax.vmap`. Without it: all rows.
    reverse
        Walk rows length - 1, ..., 0.
    unroll
        Steps per iteration of the compiled loop, as in `fori_loop`; not together with `stop`.
    stop
        `stop(carry, y)` is one bool: whether this step was the last. Its carry and row are kept.
    max_steps
        A static bound on the number of steps, for scans without rows and without a static length.
    kind, lanes, key, throw, info, progress
        As in `while_loop`; row i gets the key `jax.random.fold_in(key, i)`, also in reverse.

    Returns
    -------
    carry
        The carry after the last step.
    ys
        Rows of outputs; those that were not executed are zero. There are as many as `xs` has, else a
        static `length`, else `max_steps`.

    Raises
    ------
    TypeError
        As in `while_loop`; `f` does not return a pair; `stop` does not return one bool; `length` is not an integer;
        `reverse` is not a bool; `unroll` or `reverse` is traced.
    ValueError
        As in `while_loop`; arrays of `xs` with unequal rows; a static `length` beyond them; no way to
        know the number of steps, or the rows of `ys`.
    equinox.EquinoxRuntimeError
        A traced `length` is negative or beyond the rows of `xs`, or `max_steps` stops a scan that would
        go on, and `throw` is True.

    Notes
    -----
    Cost: `f` n times; for forward and gradient together see the `kind`. A step costs the same however
    many rows there are. Derivatives: all, in every order, also with respect to `xs`.

    """
    options = arguments.options("scan", kind, lanes, key, progress, max_steps, throw, info)
    xs, references = take_references("scan(xs=...)", xs)
    loop_spec = scan_spec(arguments.SCAN, options, f, stop, xs, length, reverse, unroll)
    functions = (f,) if stop is None else (f, stop)
    body = ScanBody(arguments.SCAN, f, stop, functions, back=step_back(options, has_rows=True))
    result, loop_info = run_scan(body, options, loop_spec, init, xs, references)
    return options.with_info(result, loop_info)


class ScanBody(NamedTuple):
    """What a scan repeats."""

    words: arguments.Words
    f: Callable[..., tuple[Any, Any]]
    stop: Callable[[Any, Any], Any] | None
    functions: tuple[Any, ...]  # the user's, for which it is traced once
    options: Hashable = ()  # what else it depends on
    parameters: tuple[str, str] = ("carry", "x")  # that of the user's function
    back: tracing.StepBack | None = None  # what the kind brings to walk back


def scan_spec(
    words: arguments.Words,
    options: arguments.Options,
    f: Any,
    stop: Any,
    xs: PyTree[Any],
    length: Any,
    reverse: Any,
    unroll: Any,
) -> LoopSpec:
    """Which rows a scan walks and how; an error where an argument does not fit."""
    extent, reverse = scan_rows(words, options, f, stop, xs, length, reverse)
    unroll = arguments.unroll_steps(words.name, unroll, extent.bound if extent.fixed else None, stop is not None)
    return _loop_spec(options, extent, f, reverse, unroll)


def _loop_spec(
    options: arguments.Options, extent: Extent, function: Any, reverse: bool = False, unroll: int = 1
) -> LoopSpec:
    reporter = options.reporter(function)
    return LoopSpec(options.name, extent, reverse, unroll, options.kind, options.lanes, options.throw, reporter)


def run_scan(
    body: ScanBody,
    options: arguments.Options,
    loop_spec: LoopSpec,
    init: PyTree[Any],
    xs: PyTree[Any],
    references: ReferenceRows = NO_REFERENCES,
) -> tuple[tuple[Any, Any], LoopInfo]:
    """A scan, by whatever name the user has called it; `references` are those whose values are among xs."""
    words, f, stop = body[:3]
    extent = loop_spec.extent
    call = scan_step(words, options, f, stop, has_rows=extent.capacity is not None)
    is_counted = stop is not None and extent.bound is None and isinstance(extent.high, Tracer)
    spec = (words.name, extent.capacity is None, options.key_spec, body.options, is_counted and loop_spec.reverse)
    called = Called(words.name, body.functions, body.parameters)
    keys = functions_of_step(options, *body.functions)
    extras, goes_on = options.extras, None if stop is None else always
    if is_counted:
        call, extras, goes_on = (
            within_length(call, loop_spec.reverse),
            [extent.high, *extras],
            lambda _: extent.high > 0,
        )
        called = called._replace(extras=("length", "key"))
    step = tracing.Step(call, words.where, keys, (*spec, is_counted), called, body.back)
    done = run(step, loop_spec, extras, init, xs, goes_on, references)
    carry, ys, loop_info = _finish(options, extent, done)
    return (carry, ys), loop_info


def _finish(options: arguments.Options, extent: Extent, done: Finished) -> tuple[Any, Any, LoopInfo]:
    """The carry, the rows and the numbers of a loop, with its run-time checks attached."""
    over, goes_on = extent.over_limit, done.goes_on
    if over is True and goes_on is None and options.throw:
        raise ValueError(arguments.limit_message(options.name, options.max_steps))
    reached = over if goes_on is None or over is False else over & goes_on
    checks, call = list(done.checks), f"loopax.{options.name}"
    if not options.throw:
        for check in extent.checks:
            reached = reached | check.failed
    if options.throw:
        checks += extent.checks
        if reached is not False:
            checks.append(Check.of(call, reached, arguments.limit_problem(options.max_steps)))
        if options.key_data is not None and extent.bound is None:
            checks.append(Check.of(call, done.num_steps >= MOST_STEPS, arguments.OUT_OF_KEYS))
    result = done.carry, done.ys, LoopInfo(done.num_steps, jnp.asarray(reached))
    carry, ys, loop_info = settle(result, checks)
    return done.hand_over(carry), thaw(ys), loop_info
