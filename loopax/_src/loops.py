"""The three loops."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, overload

from jaxtyping import Array, Int, PyTree

from loopax._src.core.finite import Finite
from loopax._src.core.ir.lanes import LanesLike
from loopax._src.frontend import options as arguments
from loopax._src.frontend.extent import Limits, fori_extent, while_extent
from loopax._src.frontend.options import SCAN, LoopOptions
from loopax._src.frontend.run import UserLoop, run_scan
from loopax._src.frontend.steps import fori_index, fori_step, scan_rows, step_back, while_step
from loopax._src.frontend.trace import Step
from loopax._src.frontend.written_rows import take_references
from loopax._src.jax_internals import api_boundary
from loopax._src.kinds import DerivativeLike, KindLike
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.leaves import LoopInfo
from loopax._src.pytrees.static import Called

# To type checkers, the result has the type that the body returns. A number as the first carry becomes an array.
C = TypeVar("C")
Y = TypeVar("Y")


@overload
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[..., C],
    init_val: PyTree[Any],
    *,
    info: Literal[False] = False,
    **options: Unpack[LoopOptions],
) -> C: ...
@overload
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[..., C],
    init_val: PyTree[Any],
    *,
    info: Literal[True],
    **options: Unpack[LoopOptions],
) -> tuple[C, LoopInfo]: ...
@api_boundary
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[..., Any],
    init_val: PyTree[Any],
    *,
    max_steps: int | None = None,
    kind: KindLike = "auto",
    derivative: DerivativeLike = None,
    lanes: LanesLike = "lockstep",
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: ProgressLike = None,
    finite: Finite | None = None,
) -> Any:
    """Repeat a body while a condition holds, with derivatives in forward and reverse mode.

    The meaning, without `max_steps`::

        val = init_val
        while cond_fun(val):
            val = body_fun(val)
        return val

    Parameters
    ----------
    cond_fun
        The condition: `cond_fun(val)` returns one bool. True takes another step.
    body_fun
        The body: `body_fun(val)` returns the next carry, with the structure, shapes and dtypes of `val`. With `key`,
        the body is called as `body_fun(val, key=...)`.
    init_val
        The first carry: any pytree. Leaves that are not arrays (functions, strings, Python bools, Python numbers in
        Equinox modules) keep their Python values inside the loop. Leaves that the body returns unchanged are not
        stored, not batched and not copied.
    max_steps
        A static bound on the number of steps. None: no bound. Reverse mode works without a bound, but can be faster
        with one.
    kind
        What a gradient stores. `"auto"`: the fastest choice that fits in 256 MiB (see `Auto`). Give one of `Auto()`,
        `Tuned()`, `Lax()`, `Checkpointed()`, `Bounded()` and `Residuals()`, the lower-case name of one, or
        `Reversible(inverse)`.
    derivative
        Which derivative the loop has. None: that of its steps. `Implicit()` or `"implicit"`: that of the fixed point to
        which the loop converges. `Truncated(last=k)`: that of the last k steps.
    lanes
        How a batch of loops runs under `jax.vmap`. A lane is one loop of the batch. Give an object or its name:

        - `"lockstep"`, `Lockstep()`: all lanes run until the slowest lane has finished.
        - `"compact"`, `Compact()`: finished lanes leave the batch.
        - `"sequential"`, `Sequential()`: one lane runs after another.
        - `"auto"`, `AutoLanes()`: the fastest of these three by an estimate.
        - `"free"`, `Free()`: for a loop with loops in its body; lanes do not wait for each other between outer steps.

        In all of them, a finished lane causes no NaN, no error and no effect.
    key
        A PRNG key. Step i gets the key `jax.random.fold_in(key, i)`. A recomputed step gets the same key. None: the
        body gets no key.
    throw
        Whether a loop that `max_steps` or `finite` stops raises an error. The error comes at run time, after the
        outermost loop. False: the loop returns the carry that it has reached.
    info
        Whether to return the pair `(val, LoopInfo)` instead of `val`: how many steps there were, whether a limit was
        reached and, with `finite`, which step broke.
    progress
        Whether to show the progress of the loop while it runs: True, or a `Progress(...)` with a label and other
        options. None: show nothing. Under `jax.vmap` there is one bar for the batch. A gradient shows the forward pass
        only. See docs/long-runs.md.
    finite
        Whether to look for numbers that are not finite: True for NaN and infinities, `"nan"` for NaN alone. A step that
        makes one is not taken: the loop ends before it, as at `max_steps`, and raises an error that names the step, the
        lane, the path and index of the element, and what it was before. Looked at are the real and complex leaves of
        the carry that the body changes, and the rows of outputs. An element that is not finite at the start never
        counts. In reverse mode, the first step whose derivative makes a cotangent that is not finite is an error, too.
        With `throw=False`, nothing is looked at in reverse mode. None: look at nothing. See docs/loops.md.

    Returns
    -------
    val
        The carry for which `cond_fun` is False, or the carry after `max_steps` steps.

    Raises
    ------
    TypeError
        - The carry changes its structure, shapes or dtypes.
        - `cond_fun` does not return one bool.
        - `max_steps` is not an int, or `throw` or `info` is not a bool.
        - One of these arguments is traced (docs/static-and-dynamic.md).
    ValueError
        - `kind`, `derivative` or `lanes` is unknown, or `max_steps` is negative.
        - `kind` is `Bounded()` or `Residuals()`, and the loop has no bound.
        - Reverse mode is taken through `Lax()`.
    equinox.EquinoxRuntimeError
        - `max_steps` stops a loop that would go on, and `throw` is True.
        - A step or its derivative makes a number that is not finite, with `finite`, and `throw` is True.
        - A loop with `key` and without `max_steps` takes more than 2147483646 steps, and `throw` is True.

    Notes
    -----
    Cost for n steps: n + 1 evaluations of `cond_fun` and n evaluations of `body_fun`. What a gradient stores and
    evaluates depends on `kind`; docs/kinds.md has a table. With the default `kind` and no bound, a gradient stores up
    to 64 carries (fewer if 64 do not fit in 256 MiB). With 64 carries and n up to 2187, forward and gradient together
    evaluate the body at most 3n times. For n up to 35594, they evaluate the body at most 4n times.

    With `finite`, a step also looks once at each number that it makes. A loop that ends before a step runs twice: the
    second time without its effects, unless they have results.

    Derivatives: forward and reverse mode, in every order. Reverse mode counts up to 2147483646 steps; beyond,
    derivatives are NaN, and so are the values where a gradient is taken.

    Sources: Griewank & Walther (2000), Stumm & Walther (2010). See docs/references.md.

    """
    options = arguments.options("while_loop", kind, lanes, key, progress, max_steps, throw, info, derivative, finite)
    goes_on, call = while_step(options, cond_fun, body_fun)
    called, depends_on = Called("while_loop", (body_fun, cond_fun), ("carry",)), ("while_loop", options.key_spec)
    step = Step(call, "body_fun of while_loop", called, depends_on, step_back(options))
    extent = while_extent(options.max_steps)
    carry, _, loop_info = UserLoop(step, options, extent, options.extras, init_val, goes_on=goes_on).finished()
    return options.with_info(carry, loop_info)


@overload
def fori_loop(
    lower: int | Int[Array, ""],
    upper: int | Int[Array, ""],
    body_fun: Callable[..., C],
    init_val: PyTree[Any],
    *,
    unroll: int | bool | None = None,
    info: Literal[False] = False,
    **options: Unpack[LoopOptions],
) -> C: ...
@overload
def fori_loop(
    lower: int | Int[Array, ""],
    upper: int | Int[Array, ""],
    body_fun: Callable[..., C],
    init_val: PyTree[Any],
    *,
    unroll: int | bool | None = None,
    info: Literal[True],
    **options: Unpack[LoopOptions],
) -> tuple[C, LoopInfo]: ...
@api_boundary
def fori_loop(
    lower: int | Int[Array, ""],
    upper: int | Int[Array, ""],
    body_fun: Callable[..., Any],
    init_val: PyTree[Any],
    *,
    max_steps: int | None = None,
    kind: KindLike = "auto",
    derivative: DerivativeLike = None,
    lanes: LanesLike = "lockstep",
    unroll: int | bool | None = None,
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: ProgressLike = None,
    finite: Finite | None = None,
) -> Any:
    """Repeat a body for a range of integers; the limits may be known only at run time.

    The meaning, without `max_steps`::

        val = init_val
        for i in range(lower, upper):
            val = body_fun(i, val)
        return val

    Parameters
    ----------
    lower, upper
        The limits: integers, static or traced. Traced limits may differ between lanes under `jax.vmap`. The index has
        the dtype that JAX promotes both limits to. If both limits are static, the index has JAX's default integer
        dtype. The dtype of the index must hold both limits.
    body_fun
        The body: `body_fun(i, val)` returns the next carry, with the structure, shapes and dtypes of `val`. With `key`,
        the body is called as `body_fun(i, val, key=...)`.
    init_val
        The first carry: any pytree, as in `while_loop`.
    max_steps
        A static bound on the number of steps. None: no bound but static limits. If a limit is traced, reverse mode can
        be faster with a bound.
    kind, derivative, lanes
        As in `while_loop`.
    unroll
        Steps per iteration of the compiled loop. None: 1. Remaining steps are taken one by one. True or 0 unrolls the
        whole loop, which needs static limits.
    key
        A PRNG key. The step with index i gets the key `jax.random.fold_in(key, i)`. None: the body gets no key.
    throw, info, progress, finite
        As in `while_loop`.

    Returns
    -------
    val
        The carry after the last step.

    Raises
    ------
    TypeError
        - As in `while_loop`.
        - A limit or `unroll` is not an integer, or `unroll` is traced.
        - One limit is uint64 and the other limit has a signed dtype.
    ValueError
        - As in `while_loop`.
        - `unroll=True` with a traced limit.
        - The index cannot hold a static limit.
        - Static limits are further apart than `max_steps`, and `throw` is True.
    equinox.EquinoxRuntimeError
        - Traced limits are further apart than `max_steps`, and `throw` is True.
        - Traced limits are further apart than 2147483647, or beyond the dtype of the index, and `throw` is True. The
          loop then takes no step.

    Notes
    -----
    Cost and derivatives: as in `while_loop`. Static limits are a bound, so `max_steps` is not needed with static
    limits.

    """
    options = arguments.options("fori_loop", kind, lanes, key, progress, max_steps, throw, info, derivative, finite)
    limits = Limits.of(lower, upper, "fori_loop")
    extent = fori_extent(limits, options.max_steps, options.throw).unrolled("fori_loop", unroll)
    first, is_weak = limits.first_index()
    called = Called("fori_loop", (body_fun,), ("i", "carry"), ("lower", "key"))
    back = step_back(options, partial(fori_index, is_weak=is_weak))
    depends_on = "fori_loop", is_weak, options.key_spec
    step = Step(fori_step(options, body_fun, is_weak), "body_fun of fori_loop", called, depends_on, back)
    carry, _, loop_info = UserLoop(step, options, extent, [first, *options.extras], init_val).finished()
    return options.with_info(carry, loop_info)


@overload
def scan(
    f: Callable[..., tuple[C, Y]],
    init: PyTree[Any],
    xs: PyTree[Any] = None,
    length: int | Int[Array, ""] | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    stop: Callable[[Any, Any], Any] | None = None,
    info: Literal[False] = False,
    **options: Unpack[LoopOptions],
) -> tuple[C, Y]: ...
@overload
def scan(
    f: Callable[..., tuple[C, Y]],
    init: PyTree[Any],
    xs: PyTree[Any] = None,
    length: int | Int[Array, ""] | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    stop: Callable[[Any, Any], Any] | None = None,
    info: Literal[True],
    **options: Unpack[LoopOptions],
) -> tuple[tuple[C, Y], LoopInfo]: ...
@api_boundary
def scan(
    f: Callable[..., tuple[Any, Any]],
    init: PyTree[Any],
    xs: PyTree[Any] = None,
    length: int | Int[Array, ""] | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    max_steps: int | None = None,
    kind: KindLike = "auto",
    derivative: DerivativeLike = None,
    lanes: LanesLike = "lockstep",
    stop: Callable[[Any, Any], Any] | None = None,
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: ProgressLike = None,
    finite: Finite | None = None,
) -> Any:
    """Scan over the rows of arrays; the number of rows to scan may be known only at run time.

    The meaning, without `max_steps`::

        carry, ys = init, zeros
        for i in range(length):                  # reversed(range(length)) if reverse
            carry, ys[i] = f(carry, xs[i])
            if stop is not None and stop(carry, ys[i]):
                break
        return carry, ys

    Parameters
    ----------
    f
        The body: `f(carry, x)` returns a pair, the next carry and a row of outputs. With `key`, the body is called as
        `f(carry, x, key=...)`.
    init
        The first carry: any pytree, as in `while_loop`.
    xs
        The rows: a pytree of arrays `(rows, ...)` with the same number of rows. Leaves that are not arrays are passed
        to `f` unchanged. None: `f` gets None.
    length
        The number of rows to scan, static or traced; at most the rows of `xs`. A traced length may differ between lanes
        under `jax.vmap`. None: all rows.
    reverse
        Whether to scan the rows length - 1, ..., 0 instead of 0, ..., length - 1.
    unroll
        Steps per iteration of the compiled loop, as in `fori_loop`. The default 1 is the only value allowed with
        `stop`.
    max_steps
        A static bound on the number of steps. The bound also sets the number of rows of `ys` if `xs` has no arrays and
        `length` is not static.
    kind, derivative, lanes
        As in `while_loop`.
    stop
        An early exit: `stop(carry, y)` returns one bool. True ends the scan after this step; the carry and the row of
        this step are kept. None: no early exit.
    key
        A PRNG key. Row i gets the key `jax.random.fold_in(key, i)`, also if `reverse` is True. None: `f` gets no key.
    throw, info, progress, finite
        As in `while_loop`.

    Returns
    -------
    carry
        The carry after the last step.
    ys
        The rows of outputs, `(rows, ...)`. Rows of steps that were not taken are zero. The number of rows is that of
        `xs`, else a static `length`, else `max_steps`.

    Raises
    ------
    TypeError
        - As in `while_loop`.
        - `f` does not return a pair, or `stop` does not return one bool.
        - `length` is not an integer, or `reverse` is not a bool.
        - `unroll` or `reverse` is traced.
    ValueError
        - As in `while_loop`.
        - The arrays of `xs` have unequal numbers of rows.
        - A static `length` is larger than the number of rows.
        - The number of steps, or the number of rows of `ys`, cannot be determined.
    equinox.EquinoxRuntimeError
        - A traced `length` is negative, or larger than the number of rows of `xs`, and `throw` is True.
        - `max_steps` stops a scan that would go on, and `throw` is True.

    Notes
    -----
    Cost for n steps: n evaluations of `f`. What a gradient stores and evaluates depends on `kind` (docs/kinds.md). The
    cost of a step does not depend on the number of rows.

    Derivatives: forward and reverse mode, in every order, also with respect to `xs`.

    """
    options = arguments.options("scan", kind, lanes, key, progress, max_steps, throw, info, derivative, finite)
    xs, references = take_references("scan(xs=...)", xs)
    extent = scan_rows(SCAN, options, f, stop, xs, length, reverse).unrolled("scan", unroll, stop is not None)
    called = Called("scan", (f,) if stop is None else (f, stop), ("carry", "x"))
    back = step_back(options, has_rows=True)
    result, loop_info = run_scan(SCAN, options, extent, f, stop, init, xs, called, back, references)
    return options.with_info(result, loop_info)
