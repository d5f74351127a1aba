"""Run the `jax.lax` loops inside someone else's function on loopax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, cast

import jax
import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.branches import cond, switch
from loopax._src.core.finite import Finite
from loopax._src.core.ir.lanes import Free, Lanes, LanesLike, Lockstep
from loopax._src.core.ir.plan import DEFAULT_SLOTS
from loopax._src.core.jaxpr.util import bind_again, evaluate, split_list
from loopax._src.core.masking import pick
from loopax._src.frontend import options as arguments
from loopax._src.frontend.trace_program import trace_program
from loopax._src.insight.explain import LoopExplanation, explanation_of
from loopax._src.jax_internals import ClosedJaxpr, dce, inner_jaxprs, jaxpr_as_fun, map_programs
from loopax._src.kinds import Kind, KindLike, to_kind
from loopax._src.loops import fori_loop, scan, while_loop
from loopax._src.pytrees.static import Why, static_bool
from loopax._src.rewrite.counters import fori_counter, most_steps

# Evaluate a jaxpr with its `jax.lax` loops (and branches) exchanged for those of loopax, wherever they stand in it.


@dataclass(frozen=True)
class Exchange:
    """How to exchange loops."""

    kind: Kind | Callable[[Any], Kind]  # of all loops, or a function of their equations
    lanes: Lanes
    max_steps: int | None  # of those without a static length
    scans: bool  # whether `lax.scan` is exchanged as well
    conds: bool  # and `lax.cond` and `lax.switch`
    finite: Finite | None  # what breaks a step, of all loops
    is_free: bool  # whether one loop is made of each and those in it: its lanes are `Free()`

    def evaluate(self, closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, of exactly its types."""
        if not self._concerns(closed):
            return jaxpr_as_fun(closed)(*operands)
        results = evaluate(closed, operands, self._equation)
        return [jaxi.of_weak_type(x, aval) for x, aval in zip(results, closed.out_avals, strict=True)]

    def _concerns(self, jaxpr: ClosedJaxpr) -> bool:
        """Whether it holds a loop to exchange."""
        return any(self._exchanges(eqn) or self._concerns_inside(eqn) for eqn in jaxpr.eqns)

    @property
    def _inside(self) -> "Exchange":
        """How to exchange loops in a loop that is exchanged: the outermost one says how lanes run in all."""
        return replace(self, lanes=Lockstep()) if self.is_free else self

    def _exchanges(self, eqn: Any) -> bool:
        is_choice, is_scan = jaxi.is_cond(eqn) and not jaxi.chooses_platform(eqn), jaxi.is_scan(eqn)
        if jaxi.is_while(eqn) or (self.scans and is_scan) or (self.conds and is_choice):
            return True
        # Free lanes would wait for each other in a loop or a branch that holds loops.
        return self.is_free and (is_scan or is_choice) and self._concerns_inside(eqn)

    def _concerns_inside(self, eqn: Any) -> bool:
        return not jaxi.is_kernel(eqn) and any(map(self._concerns, inner_jaxprs(eqn)))

    def _concerns_used(self, eqn: Any) -> bool:
        """Whether it holds a loop to exchange whose results are used: `Free` lanes are for such a loop alone."""
        used = (dce(program, [True] * len(program.out_avals), True)[0] for program in inner_jaxprs(eqn))
        return any(map(self._concerns, used))

    def _equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if self._exchanges(eqn) and jaxi.is_cond(eqn):
            index, *operands = operands
            functions = [lambda *xs, program=program: self.evaluate(program, xs) for program in jaxi.branches(eqn)]
            if len(functions) == 2:  # the first branch of a `lax.cond` is the one for False
                return cond(index, *functions[::-1], *operands, lanes=self._inside.lanes)
            return switch(index, functions, *operands, lanes=self._inside.lanes)
        if self._exchanges(eqn) and (loop := jaxi.lax_loop(eqn)):
            kind = self.kind if isinstance(self.kind, Kind) else self.kind(eqn)
            lanes = self.lanes if self._concerns_used(eqn) else self._inside.lanes
            options = {"kind": kind, "lanes": lanes, "finite": self.finite}
            if loop.cond is not None:
                return self._while(loop, operands, options | {"max_steps": self.max_steps})
            _, consts, init, xs = loop.groups(operands)

            def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                carry, y = split_list(self._inside.evaluate(loop.body, [*consts, *carry, *x]), [loop.num_carry])
                return carry, y

            carry, ys = scan(step, init, xs, loop.length, loop.reverse, loop.unroll, **options)
            return [*carry, *ys]
        if not self._concerns_inside(eqn):
            return bind_again(eqn, operands)
        if self.finite is not None and jaxi.is_jit(eqn) and (program := jaxi.inlinable(eqn)):
            return self.evaluate(program, operands)  # loops in it hand on to the one around which step has broken
        as_function = lambda program: lambda *xs: self.evaluate(program, xs)  # noqa: E731
        if (results := jaxi.bind_open_call(eqn, as_function, operands)) is not None:
            return results
        # Programs are traced again with their loops exchanged.
        exchanged = lambda closed: jax.make_jaxpr(as_function(closed))(*closed.in_avals)  # noqa: E731
        return bind_again(map_programs(eqn, exchanged), operands)

    def _while(self, loop: jaxi.LaxLoop, operands: list[Any], options: dict[str, Any]) -> Sequence[Any]:
        cond_consts, body_consts, init, _ = loop.groups(operands)

        def step(carry: Sequence[Any]) -> list[Any]:
            return self._inside.evaluate(loop.body, [*body_consts, *carry])

        def goes_on(carry: Sequence[Any]) -> Any:
            return self._inside.evaluate(loop.cond, [*cond_consts, *carry])[0]

        counter = fori_counter(loop)
        if counter is not None:
            # A `fori_loop`; the index ends at the upper limit, or where it started beyond it.
            index, upper = counter
            lower_value, upper_value = init[index], init[upper]
            dtype = loop.body.in_avals[loop.num_consts + index].dtype

            def joined(i: Any, rest: Sequence[Any]) -> list[Any]:
                others = iter(rest)
                return [i if p == index else upper_value if p == upper else next(others) for p in range(len(init))]

            def others(carry: Sequence[Any]) -> list[Any]:
                return [x for p, x in enumerate(carry) if p not in counter]

            def counted(i: Any, rest: Sequence[Any]) -> list[Any]:
                return others(step(joined(i.astype(dtype), rest)))

            rest = fori_loop(lower_value, upper_value, counted, others(init), **options)
            return joined(jnp.maximum(lower_value, upper_value), rest)
        found = most_steps(loop, init)
        if found is not None and found <= (DEFAULT_SLOTS if self.max_steps is None else self.max_steps):
            options |= {"max_steps": found, "throw": self.finite is not None}  # it takes no more
        run = partial(while_loop, **options)
        if not loop.cond.out_avals[0].shape:
            return run(goes_on, step, init)

        # A loop over all lanes of a `jax.vmap` inside the function, as JAX has it: each has its own condition.
        def of_lanes(state: tuple[Any, Sequence[Any]]) -> tuple[Any, Sequence[Any]]:
            active, carry = state
            new = [pick(active, a, b) for a, b in zip(step(carry), carry, strict=True)]
            return goes_on(new), new

        return run(lambda state: jnp.any(state[0]), of_lanes, (goes_on(init), init))[1]


_SCANS = Why("which loops the program exchanges", "give scans=True in all calls: values do not depend on it")
_CONDS = Why("which branches the program exchanges", "give conds=True in all calls: values do not depend on it")


@jaxi.api_boundary
def rewrite_loops(
    fn: Callable[..., Any],
    *,
    max_steps: int | None = None,
    kind: KindLike | Callable[[LoopExplanation], KindLike] = "auto",
    lanes: LanesLike = "lockstep",
    scans: bool = False,
    conds: bool = False,
    finite: Finite | None = None,
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
    max_steps
        A static bound on the steps of every loop whose length is not static. A loop that would take more steps raises
        at run time. None: no bound. A loop that only counts to a known number has this number as its bound if it is
        at most `max_steps`, or 64 without one.
    kind
        What gradients store, for all loops, as in `while_loop`. Or a function that returns the kind of each loop: it
        gets a `LoopExplanation` with the loop's name, source line and arrays.
    lanes
        How batches run, for all loops, as in `while_loop`. With `Free()`, one loop is made of each outermost loop and
        those in it; a `jax.lax.scan`, `cond` or `switch` that holds a loop is then replaced as well. What is stored of
        such a loop is said by `kind`, and not by a `jax.checkpoint` in it.
    scans
        Whether `jax.lax.scan`, and `fori_loop` with static limits, are replaced as well. Without replacement, these
        loops have all derivatives, but no `kind`. The default is False.
    conds
        Whether `jax.lax.cond` and `jax.lax.switch` are replaced by `loopax.cond` and `loopax.switch` with these
        `lanes`. Then a branch that no lane selects is not run, and a lane evaluates nothing of other branches.
        `jax.lax.platform_dependent` is not replaced. The default is False.
    finite
        Whether each replaced loop ends before a step that makes a NaN or an infinity, and raises an error that names
        the step, as in `while_loop`. With `scans=True`, this holds for scans as well.

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
        - `kind` or `lanes` is unknown.
        - `max_steps` is negative.
        - In the call of `rewritten`: the kind needs a bound, and there is no `max_steps`.
    equinox.EquinoxRuntimeError
        A loop takes more steps than `max_steps`, or a step makes a number that is not finite, with `finite`.

    Notes
    -----
    Cost: that of the loops, and of tracing `fn` twice. Effects happen as often as in `fn`, and do not happen again in a
    backward pass.

    Derivatives: forward and reverse mode. Custom rules (`jax.custom_jvp`, `jax.custom_vjp`,
    `jax.lax.custom_linear_solve`, `jax.lax.custom_root`) are kept and used.

    Loops inside a custom rule, and loops in Pallas kernels, are not replaced.

    Functions of a kind (the inverse of `Reversible`) get each carry as a list of arrays, in the order of its leaves.
    The carry of a `fori_loop` does not contain its index.

    """
    arguments.check_callable("fn of rewrite_loops", fn)
    kind = to_kind(cast("KindLike", kind)) if isinstance(kind, type) else kind  # a class is no function that chooses
    is_chosen = callable(kind)
    kind_or_auto = "auto" if is_chosen else kind
    options = arguments.options("rewrite_loops", kind_or_auto, lanes, max_steps=max_steps, finite=finite)
    scans = static_bool("rewrite_loops(scans=...)", scans, _SCANS)
    conds = static_bool("rewrite_loops(conds=...)", conds, _CONDS)
    chosen = partial(_kind_of, kind) if is_chosen else options.kind
    is_free = isinstance(options.lanes, Free)
    exchange = Exchange(chosen, options.lanes, options.max_steps, scans, conds, options.finite, is_free)

    @jaxi.api_boundary
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
