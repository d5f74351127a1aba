"""Run the `jax.lax` loops inside someone else's function on loopax."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

from loopax._src.frontend import options as arguments
from loopax._src.frontend.trace_program import trace_program
from loopax._src.insight.explain import explanation_of
from loopax._src.insight.explanation import LoopExplanation
from loopax._src.jax_internals import api_boundary
from loopax._src.kinds import Kind, KindLike, to_kind
from loopax._src.lanes import LanesLike
from loopax._src.pytrees.static_args import Why, static_bool
from loopax._src.rewrite.interpreter import Exchange

_SCANS = Why("which loops the program exchanges", "give scans=True in all calls: values do not depend on it")
_CONDS = Why("which branches the program exchanges", "give conds=True in all calls: values do not depend on it")


@api_boundary
def rewrite_loops(
    fn: Callable[..., Any],
    *,
    kind: KindLike | Callable[[LoopExplanation], KindLike] = "auto",
    max_steps: int | None = None,
    lanes: LanesLike = "lockstep",
    scans: bool = False,
    conds: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes what `fn` computes, with its `jax.lax` loops replaced by loops of loopax.

    Every `jax.lax.while_loop` and every `fori_loop` with traced limits is replaced, also in libraries that `fn` calls.
    The new loops have derivatives in both modes, and lanes under `jax.vmap` take different numbers of steps safely.
    Loops are found inside `jit`, `cond`, `scan`, `jax.checkpoint`, `shard_map`, functions with custom derivatives, and
    other loops.

    Parameters
    ----------
    fn
        Any function that JAX can trace. Arrays in its arguments are traced; other values (Python numbers, strings,
        functions) keep their Python values.
    kind
        What gradients store, for all loops, as in `while_loop`. Or a function that returns the kind of each loop: it
        gets a `LoopExplanation` with the loop's name, source line and arrays.
    lanes
        How batches run, for all loops, as in `while_loop`. `Free()` is not allowed.
    max_steps
        A static bound on the steps of every loop whose length is not static. A loop that would take more steps raises
        at run time. None: no bound.
    scans
        Whether `jax.lax.scan`, and `fori_loop` with static limits, are replaced as well. Without replacement, these
        loops have all derivatives, but no `kind`. The default is False.
    conds
        Whether `jax.lax.cond` and `jax.lax.switch` are replaced by `loopax.cond` and `loopax.switch` with these
        `lanes`. Then a branch that no lane selects is not run, and a lane evaluates nothing of other branches.
        `jax.lax.platform_dependent` is not replaced. The default is False.

    Returns
    -------
    rewritten
        A function: `rewritten(*args, **kwargs)` returns what `fn(*args, **kwargs)` returns. Each call traces `fn`, so
        put `jax.jit` around it. Write `jax.vmap(rewrite_loops(fn))`, not `rewrite_loops(jax.vmap(fn))`: a loop under
        `jax.vmap` is already one loop over all lanes when loopax sees it.

    Raises
    ------
    TypeError
        - `fn` is not a function.
        - `max_steps`, `scans` or `conds` is traced.
        - In the call of `rewritten`: JAX cannot trace `fn`.
    ValueError
        - `kind` or `lanes` is unknown, or `lanes` is `Free()`.
        - `max_steps` is negative.
        - In the call of `rewritten`: the kind needs a bound, and there is no `max_steps`.
    equinox.EquinoxRuntimeError
        A loop takes more steps than `max_steps`.

    Notes
    -----
    Cost: that of the loops, and of tracing `fn` twice. Effects happen as often as in `fn`, and do not happen again in a
    backward pass.

    Derivatives: forward and reverse mode. Custom rules (`jax.custom_jvp`, `jax.custom_vjp`,
    `jax.lax.custom_linear_solve`, `jax.lax.custom_root`) are kept and used.

    Loops inside a custom rule, and loops in Pallas kernels, are not replaced.

    Functions of a kind (the inverse of `Reversible`, `Implicit(fixed_point=...)`) get each carry as a list of arrays,
    in the order of its leaves. The carry of a `fori_loop` does not contain its index.

    """
    arguments.check_callable("fn of rewrite_loops", fn)
    kind = to_kind(cast("KindLike", kind)) if isinstance(kind, type) else kind  # a class is no function that chooses
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

    @api_boundary
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
