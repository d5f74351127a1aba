"""Run the `jax.lax` loops inside someone else's function on loopax."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from loopax._src.frontend import options as arguments
from loopax._src.frontend.trace_program import trace_program
from loopax._src.insight.explain import explanation_of
from loopax._src.insight.explanation import LoopExplanation
from loopax._src.kinds import Kind, KindLike, to_kind
from loopax._src.lanes import LanesLike
from loopax._src.pytrees.static_args import Why, static_bool
from loopax._src.rewrite.interpreter import Exchange

_SCANS = Why("which loops the program exchanges", "give scans=True in all calls: values do not depend on it")
_CONDS = Why("which branches the program exchanges", "give conds=True in all calls: values do not depend on it")


def rewrite_loops(
    fn: Callable[..., Any],
    *,
    kind: KindLike | Callable[[LoopExplanation], KindLike] = "auto",
    max_steps: int | None = None,
    lanes: LanesLike = "lockstep",
    scans: bool = False,
    conds: bool = False,
) -> Callable[..., Any]:
    """A function that computes what `fn` does, with its loops on loopax.

    Every `jax.lax.while_loop`, and every `fori_loop` with traced limits, that `fn` runs, also in the libraries that it
    calls, becomes a loop of loopax: differentiable in both modes, and safe in lanes under `jax.vmap`. Loops are found
    inside `jit`, `cond`, `scan`, `jax.checkpoint`, `shard_map`, functions with custom derivatives and other loops.
    Rules for derivatives (`jax.custom_jvp`, `jax.custom_vjp`, `jax.lax.custom_linear_solve`, `jax.lax.custom_root`)
    are kept: where a library has one, it is used, as without loopax.

    Parameters
    ----------
    fn
        Any function that JAX can trace. Arrays anywhere in its arguments are traced; everything else (Python numbers,
        strings, functions) stays what it is.
    kind, lanes
        As in `while_loop`, for all loops. `kind` may also be a function, which gets what `explain` knows of a loop
        (a `LoopExplanation`: its name, source line, arrays) and returns its kind. Functions that a kind brings
        (`Reversible`, `Implicit(fixed_point=...)`) get carries as lists of arrays, in the order of their leaves;
        that of a `fori_loop` is without the index. `Free()` is refused: it is for one loop, of a certain form.
    max_steps
        A static bound on the steps of every loop whose length is not static. A loop that would take more of
        them raises when the program runs.
    scans
        Whether `jax.lax.scan`, and `fori_loop` with static limits, are exchanged as well. They have all derivatives
        without it, but no kinds.
    conds
        Whether `jax.lax.cond` and `jax.lax.switch` are exchanged for `cond` and `switch` of loopax, with these `lanes`.
        Then a branch that no lane of a `jax.vmap` takes is not run, and a lane evaluates nothing of a branch that it
        does not take. A `jax.lax.platform_dependent` stays as it is.

    Returns
    -------
    rewritten
        `rewritten(*args, **kwargs)` returns what `fn(*args, **kwargs)` does. It traces `fn` in each call, so put
        `jax.jit` around it. Map it, `jax.vmap(rewritten)`, rather than rewriting a function that holds
        a `vmap`: loops in there are one loop over all lanes already.

    Raises
    ------
    TypeError
        `fn` is not a function; `max_steps`, `scans` or `conds` is traced; when it is called, that JAX cannot trace it.
    ValueError
        An unknown `kind` or `lanes`, or `Free()`; a negative `max_steps`; when it is called, a kind that needs a bound,
        without `max_steps`.
    equinox.EquinoxRuntimeError
        A loop takes more than `max_steps`.

    Notes
    -----
    Cost: that of the loops, and of tracing `fn` twice. Derivatives: all, where its loops had none. Loops that stand in
    a rule for derivatives itself, and in Pallas kernels, stay as they are. Effects happen as often as in `fn`, and not
    again in a backward pass.

    """
    arguments.check_callable("fn of rewrite_loops", fn)
    is_chosen = callable(kind)
    options = arguments.options("rewrite_loops", "auto" if is_chosen else kind, lanes, max_steps=max_steps)
    if options.lanes.is_free:
        raise ValueError(
            "rewrite_loops(lanes='free'): free lanes are for a loop whose body holds one inner loop, and this would be "
            "asked of every loop in the function. Choose 'lockstep' or 'compact', or write the loop that is meant "
            "with `loopax.while_loop(..., lanes='free')`."
        )
    scans = static_bool("rewrite_loops(scans=...)", scans, _SCANS)
    conds = static_bool("rewrite_loops(conds=...)", conds, _CONDS)
    chosen = partial(_kind_of, kind) if is_chosen else options.kind
    exchange = Exchange(chosen, options.lanes, options.max_steps, scans, conds)

    @wraps(fn)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        program = trace_program("rewrite_loops", fn, args, kwargs)
        return program.result_of(exchange.evaluate(program.closed, program.arrays))

    return rewritten


def _kind_of(choose: Callable[[LoopExplanation], KindLike], eqn: Any) -> Kind:
    """The kind that the user's function takes for a loop."""
    loop = explanation_of(eqn)
    kind = choose(loop)
    try:
        return to_kind(kind)
    except (TypeError, ValueError) as error:
        where = f"{loop.function} at {loop.source}" if loop.source else loop.function
        raise type(error)(f"rewrite_loops(kind=...), which returned {kind!r} for {where}: {error}") from None
