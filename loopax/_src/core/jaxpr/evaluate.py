"""Programs evaluated in another way: a shorthand expanded, derivatives of their own followed, effects left out."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.util import bind_again
from loopax._src.jax_internals import ClosedJaxpr, inner_jaxprs, jaxpr_as_fun, map_programs

# Functions with derivatives of their own, evaluated in another way: so are their rules, which JAX traces later.

Function = Callable[..., Any]


Evaluate = Callable[[ClosedJaxpr], Function]  # from a program to f(*flags, *inputs), which evaluates it in some way


def evaluated_by(forward: Evaluate, back: Evaluate, num_flags: int, eqn: Any) -> Function:
    """The function that an equation calls as f(*flags, *operands), evaluated in another way, as its rules are.

    It keeps its derivatives: its rules are traced as programs where JAX asks for them. `back` evaluates what a
    `jax.custom_vjp` does with cotangents, `forward` all else.
    """
    program, first = jaxi.called(eqn), num_flags
    assert program is not None
    evaluate = forward(program)
    if jaxi.is_custom_vjp(eqn):
        is_told, function = jaxi.told_what_is_perturbed(eqn), jax.custom_vjp(lambda *xs: tuple(evaluate(*xs)))

        def with_pull(*operands: Any) -> Any:
            flags, xs = ([x.value if is_told else x for x in group] for group in (operands[:first], operands[first:]))
            avals = enumerate(v.aval for v in eqn.invars)
            perturbed = [
                i for i, aval in avals if (operands[first + i].perturbed if is_told else jaxi.has_tangents(aval))
            ]
            out, pull = _traced_by(forward, partial(_forward, eqn, perturbed), flags, xs)
            return tuple(out), (flags, pull)

        def pull_back(residuals: Any, cts: Sequence[Any]) -> tuple[Any, ...]:
            flags, pull = residuals
            given = {i: ct for i, (ct, v) in enumerate(zip(cts, eqn.outvars, strict=True)) if jaxi.has_tangents(v.aval)}
            given = {i: jaxi.zeros(ct.aval) if isinstance(ct, SymbolicZero) else ct for i, ct in given.items()}
            found = _traced_by(back, lambda pull, cts: pull(_with_float0(eqn, cts))[0], flags, pull, given)
            return *(None for _ in flags), *(found.get(i) for i in range(len(eqn.invars)))

        function.defvjp(with_pull, pull_back, symbolic_zeros=is_told)
        return function
    function = jax.custom_jvp(lambda *xs: tuple(evaluate(*xs)))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        flags, xs = primals[:first], list(primals[first:])
        dots = {i: dot for i, dot in enumerate(tangents[first:]) if not isinstance(dot, SymbolicZero)}
        out, found = _traced_by(forward, partial(_on_pairs, eqn), flags, xs, dots)
        return tuple(out), tuple(_with_float0(eqn, found))

    function.defjvp(rule, symbolic_zeros=True)
    return function


def rule_of(eqn: Any) -> ClosedJaxpr | None:
    """The rule of the function that an equation calls as a program; None if there is none for these operands."""
    operands = [v.aval for v in eqn.invars]
    dots = {i: v.aval for i, v in enumerate(eqn.invars) if jaxi.has_tangents(v.aval)}
    cts = {i: v.aval for i, v in enumerate(eqn.outvars) if jaxi.has_tangents(v.aval)}
    try:
        if jaxi.is_custom_vjp(eqn):
            pull = lambda xs, cts: _forward(eqn, dots, xs)[1](_with_float0(eqn, cts))  # noqa: E731
            return jax.make_jaxpr(pull)(operands, cts)
        return jax.make_jaxpr(partial(_on_pairs, eqn))(operands, dots)
    except Exception:  # noqa: BLE001 - a rule may raise anything, and does so again where JAX asks for it
        return None


def _traced_by(evaluate: Evaluate, function: Function, flags: Sequence[Any], *arguments: Any) -> Any:
    """`function(*arguments)`, which takes and returns pytrees of arrays, evaluated so."""
    leaves, tree = jax.tree.flatten(arguments)
    closed, results = jax.make_jaxpr(lambda *leaves: function(*tree.unflatten(leaves)), return_shape=True)(*leaves)
    return jax.tree.structure(results).unflatten(evaluate(closed)(*flags, *leaves))


# The rules of an equation. What only some operands or results have, a tangent or a cotangent, is `{position: it}`.


def _of_some(function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Callable[[dict[int, Any]], list[Any]]:
    """The function of the operands at some positions. The others are as given."""
    return lambda some: list(function(*(some.get(i, x) for i, x in enumerate(operands))))


def _on_pairs(eqn: Any, operands: Sequence[Any], tangents: dict[int, Any]) -> tuple[list[Any], dict[int, Any]]:
    """All results, and the tangents of those that have one."""
    function = _of_some(lambda *xs: bind_again(eqn, xs), operands)
    out, dots = jax.jvp(function, ({i: operands[i] for i in tangents},), (tangents,))
    return out, {i: dot for i, (dot, v) in enumerate(zip(dots, eqn.outvars, strict=True)) if jaxi.has_tangents(v.aval)}


def _forward(eqn: Any, perturbed: Iterable[int], operands: Sequence[Any]) -> Any:
    """All results, and the function from cotangents of all to those of the perturbed operands."""
    return jax.vjp(_of_some(lambda *xs: bind_again(eqn, xs), operands), {i: operands[i] for i in perturbed})


def _with_float0(eqn: Any, given: dict[int, Any]) -> list[Any]:
    """Tangents or cotangents of all results, from those of results that have one."""
    avals = enumerate(v.aval for v in eqn.outvars)
    return [given[i] if i in given else np.zeros(aval.shape, jax.dtypes.float0) for i, aval in avals]


# Rules of a primitive that is a shorthand: those of the function of JAX that it stands for, its expansion.


def batch_expanded(function: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A batching rule: `jax.vmap` of the expansion. Results have lanes in front."""

    def rule(axis: Any, operands: Sequence[Any], dims: Sequence[Any], /, **params: Any) -> Any:
        in_axes = tuple(None if d is None else int(d) for d in dims)
        batched = jax.vmap(
            lambda *xs: function(*xs, **params), in_axes=in_axes, out_axes=0, **jaxi.axis_arguments(axis)
        )
        outputs = batched(*operands)
        return outputs, [0] * len(outputs)

    return rule


def jvp_expanded(function: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A jvp rule: that of the expansion.

    The linear part of a loop is not always linear. JAX also evaluates loops partially to find what does not change in a
    `lax.scan` around them, and what is unknown then are primals. So the transpose may rely on linearity, since it only
    ever sees tangents; this rule may not.
    """

    def rule(primals: Sequence[Any], tangents: Sequence[Any], /, **params: Any) -> Any:
        dots = {i: dot for i, dot in enumerate(tangents) if jaxi.is_nonzero(dot)}
        return jax.jvp(_of_some(partial(function, **params), primals), ({i: primals[i] for i in dots},), (dots,))

    return rule


# ---- programs without effects: a step that is recomputed does not print again


def silent(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop effectful equations without results (debug prints)."""
    if not closed.effects:
        return closed
    silenced = (silent_equation(eqn) if eqn.effects else eqn for eqn in closed.eqns if eqn.outvars or not eqn.effects)
    return jaxi.replace_jaxpr(closed, closed.invars, closed.outvars, list(silenced))


def silent_equation(eqn: Any) -> Any:
    """The equation with `silent` programs inside it."""
    if jaxi.is_linear_solve(eqn):
        return jaxi.with_solve(eqn, silent)
    if jaxi.is_custom(eqn):
        # The call is silent where a derivative evaluates its rule. Steps back are not repeated, so they are not.
        function = evaluated_by(lambda closed: jaxpr_as_fun(silent(closed)), jaxpr_as_fun, 0, eqn)
        with jaxi.equation_context(eqn):
            traced = jax.make_jaxpr(function)(*(v.aval for v in eqn.invars))
        (call,) = traced.eqns
        return call.replace(invars=eqn.invars, outvars=eqn.outvars)
    pruned = map_programs(eqn, silent)
    programs = list(inner_jaxprs(pruned))
    if not programs:  # an `io_callback`, say, which goes if nothing needs its results
        return eqn.replace(effects=frozenset()) if jaxi.happens(eqn.effects) else eqn
    return pruned.replace(effects=set().union(*(program.effects for program in programs)))
